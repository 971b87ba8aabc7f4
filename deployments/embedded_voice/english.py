"""Conversion of English text to its spoken form, for voices that can read only words and plain punctuation."""

# ruff: noqa: RUF001 (this file handles ambiguous characters)

import calendar
import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from deployments.embedded_voice.numbers import (
    MONTH_OF,
    RANGED,
    SIGNS,
    cardinal,
    ordinal,
    pairs,
    plural,
    rules,
    speak_numbers,
    substitute,
    table,
    year,
)

_FOLDED = {
    **dict.fromkeys("‘’‚‛′ʼ´", "'"),
    **dict.fromkeys("“”„‟″«»", '"'),
    **dict.fromkeys("—―⸺", " - "),
    **dict.fromkeys("•·‣", ", "),
    **dict.fromkeys("。｡।", ". "), **dict.fromkeys("™®©", " "),
    **dict.fromkeys("、，､؛；", ", "),
    **{kept: kept for kept in f"{SIGNS}¢‰°×²³"},
    "\r": " ", "؟": "?", "\u2212": " minus ", "…": "... ", "÷": " divided by ", "±": " plus or minus ",
    "≈": " about ", "≠": " is not equal to ", "≤": " at most ", "≥": " at least ", "→": " to ", "§": " section ",
    "№": "No. ", "∞": " infinity ", "√": " square root of ", "⁄": "/", "ß": "ss",
    "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe",
    "ø": "o", "Ø": "O", "đ": "d", "Đ": "D", "ł": "l", "Ł": "L", "þ": "th", "Þ": "Th", "ð": "d", "Ð": "D", "ı": "i",
}  # fmt: skip
_RAISED = re.compile(r"[⁺⁻][²³⁰¹⁴-⁹]*|[⁰¹⁴-⁹][²³⁰¹⁴-⁹]*|[²³][²³⁰¹⁴-⁹]++")
_RAISED_FIGURES = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_GREEK = re.compile(r"[Α-ΡΣ-Ωα-ω]")
_GREEK_WORD = re.compile(r"[Ͱ-Ͽἀ-῿]{3,}")  # shorter runs are symbols

_LINES = rules(
    (r"(?<=[A-Za-z])`(?=(?:ll|t|s|re|ve|d|m)\b)", "'"),
    (r"(?<![\w-])(?!(?:well|self|half|high|long)-)([A-Za-z]++)-\n(?=[a-z])", r"\1"),
    (r"(?<=\w)-\n(?=\w)", "-"),
    (r"\n\s*\n", ". "),
    (r"<\|[^<>|]*\|>|(?<!\S)[:;=]-?[)(DPp](?!\S)|```\w*|\n", " "),
)

_TOP_LEVELS = "com|org|net|io|ai|dev|app|edu|gov|co|uk|eu|de|fr|es|nl|ch|ca|au|jp|info|tv|xyz|tech|cloud|online|shop"
_IN_PATH = r"[^\s<>\"'()\[\]{}|\\^`*]"
_ADDRESSES = (
    re.compile(rf"(?<![\w@/.])(?:(?:https?|ftp|file)://|www\.){_IN_PATH}+(?<![.,;:!?])"),
    re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    re.compile(
        rf"(?<![\w.@-])(?:(?:[A-Za-z0-9-]+\.)+(?:{_TOP_LEVELS})\b|(?:[A-Za-z][A-Za-z0-9-]*\.)++[a-z]{{2,4}}(?=/\w)|"
        rf"localhost(?=[:/])|\d{{1,3}}(?:\.\d{{1,3}}){{3}}(?=:\d+/))(?::\d+)?(?:[/?#]{_IN_PATH}*(?<![.,;:!?]))?"
    ),
)
_SCHEME = re.compile(r"^(?:(?:https?|ftp)://|(file):///?)?(?:www\.)?")
_SPELLED_LABEL = re.compile(r"(?<=\.)(?:ai|eu|io|uk|de|fr|es|nl|ch|ca|au|tv)\b|(?<=[/=])(?:api|id|url)\b")
_IN_ADDRESSES = {
    ".": " dot ", "@": " at ", "/": " slash ", "-": " dash ", "_": " underscore ", "+": " plus ", ":": " colon ",
    "?": " question mark ", "=": " equals ", "&": " and ", "#": " hash ", "%": " percent ", "~": " tilde ",
}  # fmt: skip


_DAY = r"\b(Mon|Tues?|Wed|Thu|Thurs|Fri|Sat|Sun)\b\.?"
_TERM_ENDS = r"(?:(?<=[\d)²³])|(?<=\b[a-z])|(?<=\d[a-z]))"  # in arithmetic
_IN_TERMS = rf"[\d. +*/(){SIGNS}²³-]|(?<![a-z])[a-z](?![a-z])"
_WEEKDAYS = {name[:3]: name for name in calendar.day_name}
_MONTH = r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\b\.?"
_PUNCTUATION = rules(
    (r"(?<!\w)((?:1\d|20)?\d0)'s\b", r"\1s"),
    (r"\b(40[13])\(?([kKbB])\b\)?", lambda plan: f"{pairs(plan[1])} {plan[2].upper()}"),
    (r"\bSt\.?(?=,)", "Street"),
    (rf"{_MONTH} '(\d\d)(?![\w'])", lambda match: f"{MONTH_OF[match[1]]} {20 - (match[2] >= '40')}{match[2]}"),
    (rf"{_MONTH} ?- ?(?={_MONTH})", lambda match: f"{MONTH_OF[match[1]]} to "),
    (r"(?<![\w'])'0(\d)(?![\w'])", r"oh \1"),
    (r"(?<=\d:\d\d)([ap])(?![\w.])", r"\1m"),
    (r"(?<=\d) ?- ?(?=\d\d?(?::\d\d)? ?[aApP]\.?[mM]\b)", " to "),
    (r"(?<![\d/-])(\d\d?)-(?=[1-9]/[2-9]\b)", r"\1 "),
    (r"(?<=\d\.\d)(?=[CF]\b)", "°"),
    (r"(?<=\dx)([248])s\b", lambda boards: plural(cardinal(int(boards[1])))),
    (r"(?<![-=])[-=]++>", " to "),
    (r"\((\d{3})\)[ -]?(?=\d)|(?<=\d) ?\((0|[a-z])\)", r" \1\2 "),
    (r"(?<=\d) ?[x×] ?(?=10\^)", " times "),
    (r"(?<=\d)[x×](?=\d|twos|fours|eights)|(?<=\d) x (?=\d)", " by "),
    (r"×|(?<=\d)x(?= [a-z]{3})|(?<=\d) ?\* ?(?=\d)", " times "),
    (r"(?<=[A-Za-z]{4})\^", " "),
    (r"\^([23])(?!\d)", lambda power: "²³"[power[1] == "3"]),
    (r"(?<=[²³]) ?- ?(?=\w)", " minus "),
    (r"\^(?:st|nd|rd|th)\b", lambda match: match[0][1:]),
    (r"(?<=[\w)])\^[({]?([+-]?)(?=\w| minus )", lambda match: f" to the power of {'minus ' * (match[1] == '-')}"),
    (r"(?<![\w'])(\d{1,3}) ?(?:ft\.?|') ?(\d\d?)(?: ?in\b\.?(?! [A-Z])|\")(?![\w'])", r"\1'\2"),
    (r"(?<![\w'])1'[- ]?(\d\d?)\"?(?![\w'])", r"1 foot \1 inches"),
    (r"(?<![\w'])(\d{1,3})'[- ]?(\d\d?)\"?(?![\w'])", r"\1 feet \2 inches"),
    (r"(?<![\d.])(\d++(?:\.\d++)?) in\.(?= ?[a-z=,])", lambda match: f"{match[1]} inch{'es' * (match[1] != '1')}"),
    (r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\.?,? (1[0-2]|[1-9])/([12]?\d|3[01])\b(?!/| (?:cup|of|off|tsp|tbsp)\b)",
     lambda match: f"{_WEEKDAYS[match[1]]}, {calendar.month_name[int(match[2])]} {match[3]}"),
    (r"(?<=\b[aA] )(\d++(?:\.\d++)?)\"(?= )", r"\1-inch"),
    (rf"{_DAY} ?- ?{_DAY}", lambda match: f"{_WEEKDAYS[match[1][:3]]} to {_WEEKDAYS[match[2][:3]]}"),
    (rf"{_TERM_ENDS} {{0,2}}- {{0,2}}(?=[({SIGNS}]?(?:\d|[a-z]\b)(?:{_IN_TERMS}){{0,30}}=)", " minus "),
    (r"(?<== \d) ?- ?(?=\d)|(?<=\b[nxk])-(?=[1-9]\b(?!-))", " minus "),
    (r" ?° ?(?=[CF]\b)", "°"),
    (r"[()\[\]{}|]", ", "),
    (r"(\d ?[aApP]\.?[mM]\.?|\d%|\d:\d\d|\d(?:st|nd|rd|th)|\d0s) ?- ?(?='?\d)", r"\1 to "),
    (r"(?<=\d) ?~ ?(?=\d)", "-"),
    (rf"~(?=[{SIGNS}]?\d)", " about "),
    (r"\*", ""),
    (r'["`_~^]', " "),
)  # fmt: skip


def plain_line(text: str) -> str:
    """Return `text` as one line of ASCII, Greek letters, and characters kept by `_FOLDED`. Reads addresses as words."""
    text = _RAISED.sub(lambda run: f"^{run[0].translate(_RAISED_FIGURES)}", _GREEK_WORD.sub(" ", text))
    text = substitute("".join(map(_fold, text)), _LINES)
    for address in _ADDRESSES:
        text = address.sub(_speak_address, text)
    return substitute(text, _PUNCTUATION)


def unspoken(text: str) -> int:
    """Return the number of letters, digits and symbols in `text` that the voice cannot read."""
    text = "" if text.isascii() else _GREEK_WORD.sub(lambda word: "日" * len(word[0]), text)
    return sum(unicodedata.category(char)[0] in "LNS" and not _fold(char).strip() for char in text if char not in "™®©")


@lru_cache(maxsize=4096)
def _fold(char: str) -> str:
    if (char.isascii() and char.isprintable()) or _GREEK.match(char):
        return char
    if char in _FOLDED:
        return _FOLDED[char]
    category = unicodedata.category(char)
    if char.isspace():
        return " " if category == "Zs" or char == "\t" else "\n"
    if category in ("Cc", "Cf", "Mn", "Me"):
        return ""
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if category == "Pd":
        return "-"
    plain = unicodedata.normalize("NFKD", char)
    return " " if plain == char else (" " if "⁄" in plain else "") + "".join(map(_fold, plain))


def _speak_address(match: re.Match[str]) -> str:
    address = _SCHEME.sub(lambda scheme: f"{scheme[1]}/" if scheme[1] else "", match[0]).rstrip("/")
    address = re.sub(r":(?=\d)", " port ", address)
    address = _SPELLED_LABEL.sub(lambda label: label[0].upper(), address)
    return "".join(_IN_ADDRESSES.get(char, char) for char in address)


_ABBREVIATIONS = table(
    "Mr:Mister Mrs:Missus Ms:Miz Dr:Doctor mr:mister mrs:missus dr:doctor nth:enth n-th:enth St:Street vs:versus "
    "Jr:Junior etc:et_cetera Sr:Senior Inc:Incorporated Ltd:Limited Corp:Corporation Esq:Esquire e.g:for_example "
    "i.e:that_is a.m:AM p.m:PM A.M:AM P.M:PM Ph.D:P_H_D PhD:P_H_D Ave:Avenue Blvd:Boulevard Pkwy:Parkway Hwy:Highway "
    "Expy:Expressway Rd:Road Ct:Court Ln:Lane Tues:Tuesday Thurs:Thursday E.g:For_example I.e:That_is B.Sc:B_S_C "
    "M.Sc:M_S_C Ed.D:E_D_D"
)
_DOTTED_ABBREVIATIONS = table(  # words or names in their own right when written without the dot
    "Prof:Professor Gen:General Sgt:Sergeant Capt:Captain Lt:Lieutenant Col:Colonel Maj:Major Cpl:Corporal Adm:Admiral "
    "Rev:Reverend Hon:Honorable Gov:Governor Sen:Senator Rep:Representative Pres:President Fr:Father Mt:Mount Ft:Fort "
    "Sq:Square Pl:Place Apt:Apartment Bldg:Building Univ:University Dept:Department dept:department Assoc:Association "
    "Bros:Brothers Co:Company approx:approximately Approx:approximately incl:including excl:excluding max:maximum "
    "est:established cf:compare misc:miscellaneous temp:temp Tel:telephone tel:telephone Ext:extension ext:extension "
    "Jan:January Feb:February Aug:August Sept:September Oct:October Nov:November Dec:December Mon:Monday Tue:Tuesday "
    "Wed:Wednesday Thu:Thursday Fri:Friday resp:respectively viz:namely"
)
_MAY_END_A_SENTENCE = (
    "etc Jr Sr Inc Ltd Corp a.m p.m A.M P.M St Ave Blvd Rd Ct Ln Sq Pl Esq Co Bros Pkwy Hwy Expy PhD Ph.D misc"
)
_BEFORE_NUMBERS = table(
    "No:number no:number Nos:numbers Fig:figure fig:figure Figs:figures Vol:volume vol:volume p:page pp:pages "
    "Ch:chapter ch:chapter ca:about c:circa Sec:section Art:article Eq:equation"
)
# Uppercase words that are read as words. Other uppercase words of up to five letters are spelled out.
_WORDS_IN_CAPITALS = (
    "NASA NATO UNESCO UNICEF OPEC ASAP COVID AIDS SIM PIN RAM ROM GIF JPEG JSON CUDA SWAT LASER RADAR SCUBA FIFA YOLO "
    "AN AND ANY ARE AS BE BEST BIG BUT BY CAN DAY DO EVEN EVER EVERY FOR FREE FROM GET GO GOOD GREAT HAVE HE HELLO "
    "HELP HER HERE HI HIS HOW IF IN IS ITS JUST KNOW LIKE LOOK LOVE MAY ME MORE MOST MUCH MUST MY NEVER NEW NEXT NO "
    "NOT NOTE NOW OF OFF OLD ON ONE ONLY OR OUR OUT OVER READ REAL SALE SAY SEE SHE SO STAY STOP SUCH THAN THAT THE "
    "THEIR THEM THEN THERE THEY THIS TIME TO TODAY TOO TRUE TWO UP VERY WAIT WANT WAS WAY WE WERE WHAT WHEN WHERE WHO "
    "WHY WILL WITH WOW YEAR YES YOU YOUR PART"
)
_READ_AS_WORDS = frozenset(_WORDS_IN_CAPITALS.split())
_SPELLED_LETTERS = 5
_INTERJECTIONS = ("hm", "hmm", "hmmm", "hmph", "mm", "mmm", "sh", "shh", "psst", "tsk", "brr", "grr", "pfft", "zzz")
_SYMBOLS = {
    "&": "and", "+": "plus", "=": "equals", "@": "at", "%": "percent", "/": "slash", "\\": "backslash",
    "$": "dollar", "£": "pound", "€": "euro", "¥": "yen", "₹": "rupee", "°": "degrees", "<": "less than",
    ">": "greater than", "#": "hash", ">=": "at least", "<=": "at most", "==": "equals", "!=": "is not equal to",
    "²": "squared", "³": "cubed", "‰": "per mille", "¢": "cents", "₩": "won", "₿": "bitcoin",
}  # fmt: skip
_IN_CAPITALS = {"OK": "okay", "WWI": "World War one", "WWII": "World War two"}
_ROMAN = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_COUNTED = (  # nouns followed by cardinal numbers; names are followed by ordinals
    "Chapter Part Act Scene Section Volume Book War Phase Vol Wars Bowl Type Stage Level Grade Class Title Article "
    "Rocky Fantasy Apollo Mark Table Figure Appendix Episode Season Psalm Version Unit Lesson Step Round Category "
    "Model Series Division Group Plan Item Rule Corps Canto Page Pentium Saturn Gemini Panel Zone Region Line Schedule "
    "Theorem Quest"
)
_NUMBERED = tuple(_COUNTED.split())
_NUMBERED_ALONE = _NUMBERED[:9]  # also when followed by a single letter
_KINGS = "Charles Henry George James Edward Philip Louis Leo Pius Frederick Gustav Carl"
_STRONGEST_FIRST = "?!.;:,"
_SHOUTED_WORDS = 3


def _any_of(words: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


# Words that begin a new sentence after a possible abbreviation
_BEGUN = "The|It|He|She|We|They|You|I|A|An|In|On|At|But|And|So|If|When|What|Then|This|That|There|Turn|My|For|No|Yes"
_PERSONS = "(?:The|This|My|Our|Your|His|Her)"  # before "Dr.", which then means "doctor"
_GOES_ON = rf"(?! (?!.\.)(?:{_BEGUN})\b)"
_OPTIONAL_DOT = rf"({_any_of(_ABBREVIATIONS)})(?![A-Za-z'])(\.?)"
_DOTTED = rf"({_any_of(_DOTTED_ABBREVIATIONS)})(\.)"
_ABBREVIATION = re.compile(rf"(?<![A-Za-z'])(?!Ave Maria)(?:{_OPTIONAL_DOT}|{_DOTTED})(?= ?([A-Z])?)")
_INITIALS = re.compile(r"(?<![A-Za-z'.])(?:[A-Za-z]\.)+[A-Za-z](?![A-Za-z'])\.?")
_SHORTENED = table("w/o:without w/:with b/c:because y/o:years_old N:North S:South E:East W:West")
_ZONE = r"((?i:[ecmp][sd]t|et|cet|gmt|utc|bst|cest|ist|jst))\b"
_SHORT = rules(
    (r"(?<![\w/])(w/o|w/(?= )|b/c|y/o)(?![\w/])", lambda match: _SHORTENED[match[1]]),
    (rf"(?<=[aApP])\.?[mM]\.? ?{_ZONE}", lambda match: f"m {match[1].upper()}"),
    (rf"\best\. ?(?!(?:1[5-9]|20)\d\d)(?=[{SIGNS}\d])", "estimated "),
    (r"(?<=\d)(?=(?:[ECMP][SD]T|GMT|UTC)\b)", " "),
    (r"\b(UTC|GMT) ?-(?=\d)", r"\1 minus "),
    (rf"{_DAY},? (?=[A-Z][a-z]{{2,8}}\.? \d|\d{{1,2}} [A-Z])",
     lambda match: f"{_WEEKDAYS[match[1][:3]]}, "),
    (r"(?<=\d )([NSEW])\.?(?= (?:[A-Z][a-z]|\d))", lambda match: _SHORTENED[match[1]]),
    (r"\b((?:I|US|SR)-\d{1,3}|(?:Route|Hwy|Highway)\.? \d{1,3}) ([NSEW])\b",
     lambda road: f"{road[1]} {_SHORTENED[road[2]]}"),
    (r"(?<=\d )([NS])([EW])\b(?= )", lambda match: _SHORTENED[match[1]] + _SHORTENED[match[2]].lower()),
    (r"(?<!\d )\bmin\.(?= [a-z])", "minimum"),
    (r"\b(St|Ave|Blvd|Rd|Dr|Ln|Ct|Pl)\.? ([NS])([EW])\b",
     lambda match: f"{_ABBREVIATIONS.get(match[1], 'Place')} {_SHORTENED[match[2]]}{_SHORTENED[match[3]].lower()}"),
    (rf"(?<![A-Za-z'])St\b\.?{_GOES_ON}(?! (?:Apt|Suite|Ste|Unit|Floor|Room)\b) ?(?=[A-Z])", "Saint "),
    (r"\b(Sat|Sun)\.(?= ?(?:[\d&+-]|(?:and|or|to|at|from|until|only|open|closed)\b))", lambda day: _WEEKDAYS[day[1]]),
    (r"(?<=\d[a-z]{2} )fl\b\.?", "floor"),
    (r"(?<=[a-z]s )([IVX]++) ?- ?([IVX]++)(?![\w-])", lambda run: f"{roman_value(run[1])} to {roman_value(run[2])}"),
    (r"\b([A-Z])\.(?=\d)", r"\1 "),
    (rf"\b(?!{_PERSONS} )([A-Z][a-z]+) Dr\b(?:\.(?= [a-z])|(?=\.?(?:$|[,;!?]| [a-z]| (?:{_BEGUN})\b)))", r"\1 Drive"),
    (rf"(?<![\w'.])(?<!\b[A-Za-z] )([A-Z])\.{_GOES_ON}(?= [A-Z][.a-z])", r"\1"),
    (r"(?<=\d )(sq|cu|fl)\. ?(?=[a-z])", r"\1 "),
    (r"\b(A|M)-(Z|F)\b", r"\1 to \2"),
    (r"\b([CF])#", r"\1 sharp "),
    (r"#(?=[A-Z]{0,3}-?\d)", " number "),
    (r"#(?=[A-Za-z])", " hashtag "),
    (r"/ ?(?=(?:second|minute|hour|day|night|week|month|year|person|user|item|mile)\b)", " per "),
    (rf"(?<![A-Za-z'.])({_any_of(_BEFORE_NUMBERS)})\. ?(?=\d)", lambda match: f" {_BEFORE_NUMBERS[match[1]]} "),
    (r"\bv\.? ?(?=\d+\.\d)", "version "),
)  # fmt: skip
_ROMAN_NUMBER = re.compile(
    r"(?:\b((?:(?:King|Queen|Pope|Emperor|Tsar|Prince) )?[A-Za-z]++) )?\b([IVXLCDM]++)\b(?!'[^s])"
)
_VALID_ROMAN = re.compile(r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")
_SYMBOL = re.compile(_any_of(_SYMBOLS))
_CAPITALS_IN_WORD = re.compile(r"(?<=[a-z])(?=[A-Z]{2})|(?<=[A-Z]{2})(?=[A-Z](?:[a-rt-z]|s[a-z]))")
_CAPITALS = re.compile(r"(?<![A-Za-z])([A-Z]{2,})(s?)(?![A-Za-z])")
_SPELLED = re.compile(
    rf"(?<![A-Za-z'])(?:[bcdfghjklmnpqrstvwxz]{{2,{_SPELLED_LETTERS}}}|api|url|cpu|gpu|usb|otp|faq)(?![A-Za-z'])"
)
_MINUS = rf"[{SIGNS}]?\.?\d"  # characters that may follow a minus sign
_TIDY = rules(
    (r"(?<![A-Za-z\d])'(?!\d0s\b)|(?<=\d)'(?!s\b)|'(?![A-Za-z]|\d0s\b)", " "),
    (rf"{RANGED} - (?={_MINUS})", " to "),
    (r"-{2,}|(?<=\s)-(?=\s)", ", "),
    (rf"-(?![A-Za-z]|{_MINUS})|(?<![A-Za-z\d])-(?=[A-Za-z])", " "),
    (r"\s+", " "),
    # The full stop of an abbreviation stays before a comma until abbreviations have been expanded.
    (r"(?<=[A-Za-z])\. ?([,;])(?= [\w'])", r".\1"),
    (r"(?!\.[,;] )(?: ?[.,?!;:])+(?!\d)", lambda run: min(run[0].replace(" ", ""), key=_STRONGEST_FIRST.index)),
    (r"^(?:[.,?!;:] ?)+(?!\d)", ""),
)


def spoken_english(text: str) -> str:
    """Return the spoken form of the text: letters, apostrophes and hyphens within words, `. , ? ! ; :` and spaces.

    Numbers, dates, money, units, abbreviations, acronyms and addresses become words. Markdown, emoji and other scripts
    are removed. The result ends with a sentence mark, or is empty if there is nothing to say. Text in spoken form is
    left unchanged. Never raises. Takes time proportional to the length of the text.
    """
    text = _tidy(plain_line(text))
    if _shouted(text):
        text = text.lower()
    text = _CAPITALS_IN_WORD.sub(" ", text)
    text = speak_numbers(_expand_abbreviations(text))
    text = _CAPITALS.sub(_spell_capitals, _SYMBOL.sub(lambda symbol: f" {_SYMBOLS[symbol[0]]} ", text))
    text = _SPELLED.sub(lambda match: match[0] if match[0] in _INTERJECTIONS else " ".join(match[0].upper()), text)
    text = _GREEK.sub(lambda letter: f" {unicodedata.name(letter[0]).split()[-1].lower().replace('md', 'mbd')} ", text)
    text = _tidy(re.sub(r"[^A-Za-z' .,?!;:-]+", " ", text))
    return spoken_english(text.lower()) if _shouted(text) else text


def _tidy(text: str) -> str:
    """Drop lone marks, reduce runs of punctuation to the strongest mark, and add a full stop at the end if missing."""
    text = substitute(text, _TIDY).strip()
    return text if not text or text[-1] in ".?!" else text.rstrip(",;: ") + "."


def _shouted(text: str) -> bool:
    """Return whether all letters are capitals, in which case capitalization carries no information."""
    words = [] if re.search(r"[a-z]", text) else _CAPITALS.findall(text)
    return len(words) >= _SHOUTED_WORDS and max(len(word) for word, _ in words) > _SHOUTED_WORDS


def _expand_abbreviations(text: str) -> str:
    """Expand abbreviations. Afterwards, full stops only end sentences, and each is followed by a space."""
    text = _ABBREVIATION.sub(_expand, substitute(text, _SHORT))
    text = _INITIALS.sub(lambda match: f" {' '.join(match[0].replace('.', '').upper())} ", text)
    text = _ROMAN_NUMBER.sub(_speak_roman, text)
    text = re.sub(r"(?<=[A-Za-z\d])\.(?=[a-z])", " dot ", text)
    text = re.sub(r"\.(?=[,;])", "", text)
    return re.sub(r" {2,}|(?<=[.,?!;:])(?=[A-Za-z])", " ", text)


def _expand(match: re.Match[str]) -> str:
    short, ends = match[1] or match[3], bool(match[2] or match[4]) and match[5] is not None
    words = _ABBREVIATIONS.get(short) or _DOTTED_ABBREVIATIONS[short]
    return f" {words}{'.' if ends and short in _MAY_END_A_SENTENCE.split() else ''} "


def roman_value(figures: str) -> int:
    values = [_ROMAN[figure] for figure in figures]
    return sum(-value if value < max(values[place:]) else value for place, value in enumerate(values))


def _speak_roman(match: re.Match[str]) -> str:
    """Read a Roman numeral: a cardinal after a word such as Chapter, an ordinal after a name or before "century"."""
    before, figures = match[1] or "", match[2]
    title, _, name = before.rpartition(" ")
    counted = name.capitalize() in _NUMBERED
    of_century = match.string.startswith(" century", match.end())
    if len(figures) == 1:
        behind = match.string[match.end() : match.end() + 3]
        is_pronoun = figures == "I" and name not in ("War", "Phase") and not re.match(r"\s*(?:$|[^\w\s'])", behind)
        is_king = name in _KINGS.split() and figures != "I" and not re.match(" [A-Z][a-z]", behind)
        is_number = figures in "IVX" and (bool(title) or is_king or (name in _NUMBERED_ALONE and not is_pronoun))
    else:
        is_small = set(figures) <= set("IVX") and figures not in ("XX", "XXX")
        is_number = counted or of_century or is_small or (figures[0] == "M" and len(figures) > 4)
    if not is_number or not _VALID_ROMAN.fullmatch(figures):
        return match[0]
    number = roman_value(figures)
    if of_century or (name.istitle() and not counted and name not in _BEGUN.split("|")):
        return f"{before} {'' if of_century else 'the '}{ordinal(number)}"
    return f"{before} {year(number)}"


def _spell_capitals(match: re.Match[str]) -> str:
    word, ending = match.groups()
    if word in _IN_CAPITALS:
        return _IN_CAPITALS[word]
    if word in _READ_AS_WORDS or (len(word) > _SPELLED_LETTERS and re.search("[AEIOUY]", word)):
        return match[0]
    return " ".join(word) + ("'s" if ending else "")
