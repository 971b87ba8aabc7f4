"""Conversion of numbers in English text to words: dates, times, money, measurements, telephone and other numbers."""

import calendar
import re
from collections.abc import Callable
from functools import lru_cache

from num2words import num2words

Speak = Callable[[re.Match[str]], str]
Rules = tuple[tuple[re.Pattern[str], Speak | str], ...]

LARGEST_DIGITS = 15  # longer integers are read digit by digit; 15 digits are hundreds of trillions
_PLAIN_DIGITS = 6  # longer digit strings without separators are read as codes, unless they are round


def cardinal(number: int) -> str:
    """Return the cardinal, without "and", for `0 <= number < 10**LARGEST_DIGITS`: one hundred five."""
    return _words(number, "cardinal")


def ordinal(number: int) -> str:
    """Return the ordinal, for the same range as `cardinal`: twenty-first for 21."""
    return _words(number, "ordinal")


def year(number: int) -> str:
    """Return a year, such as nineteen oh five or twenty twenty-six. Outside 1100 to 2099 return the cardinal."""
    return _words(number, "year").replace("oh-", "oh ") if 1100 <= number < 2100 else cardinal(number)


@lru_cache(maxsize=4096)
def _words(number: int, kind: str) -> str:
    words: str = num2words(number, to=kind)
    return words.replace(" and ", " ").replace(",", "")


def plural(words: str) -> str:
    """Return the words with the last one made plural: nineteen nineties."""
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def digits(figures: str) -> str:
    """Return one word per digit. Ignores other characters."""
    return " ".join(cardinal(int(figure)) for figure in figures if figure.isdigit())


def pairs(figures: str) -> str:
    """Return a number read in pairs, such as a house or flight number: forty ninety, three twenty, four oh five."""
    first, last = figures[:-2], figures[-2:]
    if last == "00":
        return cardinal(int(figures))
    return f"{cardinal(int(first))} {'oh ' if last[0] == '0' else ''}{cardinal(int(last))}"


def table(entries: str) -> dict[str, str]:
    """Parse `key:value` entries. An underscore in a value means a space."""
    return {key: value.replace("_", " ") for key, _, value in (entry.rpartition(":") for entry in entries.split())}


def rules(*written: tuple[str, Speak | str]) -> Rules:
    return tuple((re.compile(pattern), speak) for pattern, speak in written)


def substitute(text: str, rules: Rules) -> str:
    """Apply the rules to the text in order."""
    for pattern, speak in rules:
        text = pattern.sub(speak, text)
    return text


def integer(figures: str) -> str:
    """Return the words for a digit string, with or without thousands separators.

    Numbers with a leading zero are treated as codes and read digit by digit, as are long numbers that are not round and
    have no separators.
    """
    if re.search(r",\d\d,", figures):
        return _indian(figures.replace(",", ""))
    plain = figures.replace(",", "")
    long = len(plain) > _PLAIN_DIGITS and plain == figures and not plain.endswith("000")
    if len(plain) > LARGEST_DIGITS or long or (plain[0] == "0" and len(plain) > 1):
        return digits(plain)
    return cardinal(int(plain))


def _indian(figures: str) -> str:
    parts = ((figures[:-7], " crore"), (figures[-7:-5], " lakh"), (figures[-5:], ""))
    return " ".join(cardinal(int(part)) + name for part, name in parts if part.strip("0"))


def decimal(figures: str) -> str:
    """Return the words for an integer or a decimal: three point one four. Further points are also read."""
    whole, *parts = figures.split(".")
    return " point ".join((integer(whole or "0"), *(digits(part) for part in parts)))


# Repetitions are possessive (`++`) and start where no other match can start, which keeps the time linear in the text.
_WHOLE = r"(?:\d{1,2}(?:,\d\d){1,4},\d{3}(?![\d,])|\d{1,3}(?:,\d{3}){1,4}(?!\d)|\d++)"
_AMOUNT = rf"(?:{_WHOLE}(?:\.\d++)?|\.\d++)"
_NUMBER = rf"(?<![\w.]){_AMOUNT}"
_HALF_OF_DAY = r"([aApP])\.?[mM](?![\w'])"
_HALF_OR_NOT = rf"(?: ?{_HALF_OF_DAY})?"
# A noun modified by the amount before it: a $5 bill, a 5 km run
_DESCRIBED = re.compile(
    r"[ -](?!(?:or|and|to|in|for|of|on|at|is|was|per|from|more|less|each|by|with|than|if|but|as|that|so)\b)[a-z]{2}"
)
_PRICED = re.compile(
    " (?:bill|note|loan|deal|fund|house|home|project|program|plan|budget|contract|question|investment|mark|prize|fine"
    r"|fee|ticket|company|market|industry|settlement|lawsuit|car|phone|bonus|grant|round|debt|package|coin)\b"
)

_MONTHS = calendar.month_name[1:]
MONTH_OF = {name[:3]: name for name in _MONTHS}
_MONTH = "|".join(
    [*_MONTHS, *map(str.upper, _MONTHS), *(name.lower() for name in _MONTHS if name not in ("March", "May"))]
    + [rf"{name[:3]}\b\.?|{name[:3].upper()}\b\.?" for name in _MONTHS]
    + [r"(?:Sept|SEPT)\b\.?|(?:jan|feb|apr|jun|jul|aug|sept?|oct|nov|dec)\b\.?"]
)
_DAY = r"(\d{1,2})(?:st|nd|rd|th|ST|ND|RD|TH)?"

_LARGE = "thousand million billion trillion lakh crore"
_SCALES = table("k:thousand m:million mn:million b:billion bn:billion t:trillion tn:trillion")
_SCALES |= {name: name for name in _LARGE.split()}
_SCALE = rf"(?:(?:[ -]?({_LARGE.replace(' ', '|')}|[mbt]n)|([kKmMbBtT]))(?![\w']))?"
SIGNS = "$£€¥₹₩₽₺₪₿₫₴₱฿₦"  # currency signs
_MONEY = (  # signs and codes: singular, plural, singular hundredth, plural hundredth, unless regular or cent, cents
    "$ USD:dollar £ GBP:pound/pounds/penny/pence € EUR:euro ¥ JPY:yen/yen/sen/sen ₩ KRW:won/won/jeon/jeon ₹ INR Rs "
    "Rs.:rupee/rupees/paisa/paise ₽ RUB:ruble/rubles/kopek/kopeks ₺:lira/lira ₪ ILS:shekel ₿ BTC:bitcoin ₫ "
    "VND:dong/dong ₴ UAH:hryvnia ₱:peso ฿ THB:baht/baht ₦ NGN:naira/naira R$ BRL:real/reais CHF:Swiss_franc kr "
    "SEK:krona/kronor NOK DKK:krone/kroner CNY RMB:yuan/yuan PLN:zloty US$:U_S_dollar C$ CA$ CAD:Canadian_dollar MX$ "
    "MXN:peso A$ AU$ AUD:Australian_dollar HK$:Hong_Kong_dollar NZ$ NZD:New_Zealand_dollar S$:Singapore_dollar"
)
_CURRENCIES = {
    sign: (*said.split("/"), *(plural(said), "cent", "cents")[said.count("/") :])
    for signs, said in re.findall(r"([^:]+):(\S+) ?", _MONEY)
    for sign in signs.split()
}
_CODES = "|".join(sorted((re.escape(sign) for sign in _CURRENCIES if sign not in SIGNS), key=len, reverse=True))
_CURRENCY = rf"(?:(?<![A-Za-z])(?:{_CODES})|[{SIGNS}])"

_PREFIXES = table("k:kilo M:mega G:giga T:tera P:peta c:centi d:deci h:hecto m:milli μ:micro n:nano :")
_MEASURED = (  # unit symbols, including prefixes
    "m,kdcmμn:meter g,kmμ:gram l,mdc:liter L,md:liter V,km:volt W,kmMG:watt Wh,kMG:watt-hour Pa,khM:pascal mol,m:mole "
    "Hz,kMG:hertz cal,k:calorie Ω,kM:ohm s,mμn:second bps,kMG:bit_per_second kB:kilobyte KB:kilobyte MB:megabyte "
    "GB:gigabyte TB:terabyte PB:petabyte kb:kilobyte mb:megabyte gb:gigabyte tb:terabyte KiB:kibibyte MiB:mebibyte "
    "GiB:gibibyte mA:milliamp mAh:milliamp-hour Ah:amp-hour kJ:kilojoule mi:mile yd:yard ft:foot lb:pound lbs:pound "
    "oz:ounce fl_oz:fluid_ounce t:ton gal:gallon tsp:teaspoon tbsp:tablespoon h:hour hr:hour hrs:hour min:minute "
    "mins:minute sec:second secs:second yr:year yrs:year mo:month mos:month wk:week wks:week ha:hectare dB:decibel "
    "px:pixel MP:megapixel kph:kilometer_per_hour mph:mile_per_hour fps:frame_per_second rpm:revolution_per_minute "
    "bpm:beat_per_minute °C:degree_Celsius °F:degree_Fahrenheit °:degree M:million sq_ft:square_foot sq_mi:square_mile "
    "sq_km:square_kilometer sq_m:square_meter cu_ft:cubic_foot psi:pound_per_square_inch ppm:part_per_million "
    "pct:percent pct.:percent"
)
_UNITS = {
    (prefix + symbol).replace("_", " "): (name, re.sub("(?<=hertz|rcent|llion)s", "", several.replace("foots", "feet")))
    for symbol, prefixes, said in re.findall(r"([^ ,:]+),?([^ ,:]*):(\S+)", _MEASURED)
    for prefix in [*prefixes, ""]
    for name in [_PREFIXES[prefix] + said.replace("_", " ")]
    for several in [re.sub("^(?:degree|.+?)(?= per | [CF]|$)", r"\g<0>s", name)]
}
_IN_ANY_CASE = [unit for unit in _UNITS if len(unit) > 2 or unit in ("km", "kg", "cm", "ml")]
_UNITS = {case(unit): _UNITS[unit] for case in (str.upper, str.lower, str.capitalize) for unit in _IN_ANY_CASE} | _UNITS
_UNIT = "|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))
_POWERS = {"²": ("square ", " squared"), "³": ("cubic ", " cubed"), "2": ("square ", ""), "3": ("cubic ", "")}
_PERIODS = {"d": "day", "mo": "month", "yr": "year", "wk": "week", "ea": "each"}
_PERIOD = r"(sec|s|min|hr|h|d|wk|mo|yr|ea|kg|lb|oz|km|mi|ml|GB|MB|L|l)(?![\w'])"


def speak_numbers(text: str) -> str:
    """Return `text`, one line of folded characters, with all numbers as words. The result has no digits."""
    return substitute(text, _RULES)


def _date(year_figures: str, month: str, day: str) -> str | None:
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return None
    is_short = len(year_figures) == 2 and year_figures[0] == "0"
    words = f"oh {digits(year_figures[1])}" if is_short else year(int(year_figures))
    return f" {_MONTHS[int(month) - 1]} {ordinal(int(day))}, {words} "


def _date_in_figures(match: re.Match[str]) -> str:
    first, separator, second, years = match.groups()
    days = ((second, first), (first, second))[:: 1 if separator == "." else -1]  # month and day
    return next(filter(None, (_date(years, *each) for each in days)), match[0])


def _groups(match: re.Match[str]) -> str:
    """Read a number in groups, such as a telephone number, digit by digit with a pause after each group."""
    sign = " plus " if match[0].startswith("+") else " "
    return sign + ", ".join(digits(group) for group in re.findall(r"\d+", match[0])) + " "


def _days(first: str, last: str | None) -> str:
    return " to ".join(ordinal(int(day)) if 1 <= int(day) <= 31 else day for day in (first, last) if day)


def _time(match: re.Match[str]) -> str:
    hour, minute = int(match[1]), int(match[2])
    if (hour > 24 and len(match[2]) < 2) or minute > 59:
        return f" {cardinal(hour)} to {cardinal(minute)} " + (f"to {cardinal(int(match[3]))} " if match[3] else "")
    words = cardinal(hour)
    if minute:
        words += f" oh {cardinal(minute)}" if minute < 10 else f" {cardinal(minute)}"
    elif not match[4]:
        words += " o'clock" if 1 <= hour <= 12 else " hundred"
    if match[3]:
        words += f" and {cardinal(int(match[3]))} second{'' if int(match[3]) == 1 else 's'}"
    return f" {words} " + (f"{match[4].upper()} M" if match[4] else "")


def _duration(match: re.Match[str]) -> str:
    hours, minutes, seconds = match[1], match[2] or match[4], match[3] or match[5]
    return " ".join(f"{part} {unit}" for part, unit in ((hours, "hrs"), (minutes, "mins"), (seconds, "secs")) if part)


def _price(match: re.Match[str]) -> str:
    """Read an amount, perhaps with a scale, such as $5.20 or €1m. Before a noun the currency is singular: a $5 bill."""
    article, currency, figures, *scales = match.groups()
    noun = _DESCRIBED if article else _PRICED
    is_one = noun.match(match.string, match.end()) is not None
    if scale := next(filter(None, scales), None):
        return f"{article or ''} {decimal(figures)} {_SCALES[scale.lower()]} {_CURRENCIES[currency][not is_one]} "
    return (article or "") + _amount(figures, currency, is_one=is_one)


def _amount(figures: str, currency: str, *, is_one: bool = False) -> str:
    one, many, one_cent, cents = _CURRENCIES[currency]
    many, cents = (one, one_cent) if is_one else (many, cents)
    whole, _, part = figures.partition(".")
    if len(part) != 2:
        return f" {decimal(figures)} {one if figures == '1' else many} "
    words = [f"{integer(whole or '0')} {one if whole == '1' else many}"] if whole.strip("0") or part == "00" else []
    if part != "00":
        words.append(f"{cardinal(int(part))} {one_cent if part == '01' else cents}")
    return f" {' and '.join(words)} "


def _decade(match: re.Match[str]) -> str:
    before, apostrophe, figures = match[1], match[2], match[3]
    is_decade = before or apostrophe or int(figures) >= 70
    return f"{before or ''} {plural(year(int(figures))) if is_decade else cardinal(int(figures)) + ' seconds'} "


def _measure(match: re.Match[str]) -> str:
    article, figures, hyphen, *unit = match.groups()
    is_described = bool(article or hyphen) and _DESCRIBED.match(match.string, match.end()) is not None
    return f"{article or ''} {decimal(figures)} {_unit(*unit, is_one=figures == '1' or is_described)} "


def _unit(unit: str, power: str | None, per: str | None, per_power: str | None = None, *, is_one: bool = False) -> str:
    said = _POWERS.get(power or "", ("",))[0] + _UNITS[unit][not is_one]
    if per is None:
        return said
    square, squared = _POWERS.get(per_power or "", ("", ""))
    name = _UNITS[per][0]
    return f"{said} per {name}{squared}" if name == "second" else f"{said} per {square}{name}"


def _fraction(match: re.Match[str]) -> str:
    whole, top, bottom, unit = match.groups()
    is_date = int(bottom) in _DAYS_NOT_PARTS or match.string.endswith(("On ", " on ", " by "), 0, match.start())
    if is_date and not whole and not unit and int(top) <= 12 and (date := _date("1", top, bottom)):
        return date.removesuffix(", one ")
    before = f" {integer(whole)}" if whole else ""
    after = f" {_UNITS[unit][bool(whole)]} " if unit else " "
    if len(top) > 2 or len(bottom) > 2 or not 0 < int(top) < int(bottom):
        return f"{before} {integer(top)} over {integer(bottom)}{after}"
    part = {2: "half", 4: "quarter"}.get(int(bottom)) or ordinal(int(bottom))
    words = f"{cardinal(int(top))} {part if int(top) == 1 else plural(part)}{after}"
    return f"{before} and {words}" if before else f" {words}"


def _joined(figures: str, joint: str, most: int = 3) -> str:
    return f" {joint.join(integer(part) if len(part) <= most else digits(part) for part in figures.split('.'))} "


def _plain(match: re.Match[str]) -> str:
    figures = match[0]
    is_year = len(figures) == 4 and figures.isdigit() and figures[0] != "0"
    return f" {year(int(figures)) if is_year else decimal(figures)} "


def _with_commas(match: re.Match[str]) -> str:
    whole, *decimals = match.groups()
    return ".".join([re.sub(r"[.' ]", ",", whole), *decimals])


_DAYS_NOT_PARTS = frozenset(range(13, 32)) - {15, 16, 20, 24, 30}
_ALONE = rf"(?<![\w.,:/+-])(?<!\d )(?<![{SIGNS}]\d )"  # not part of another number
_OF_DECADES = "[Tt]he|[Ii]n|[Mm]id|[Ee]arly|[Ll]ate|to|his|her|their|my|our|your"
_DASH = r" ?- ?"
RANGED = r"(?:(?<=\d)|(?<=\d[kKmMbB%])|(?<=\d[mbt]n)|(?<=°[CF]))"  # the start of a range
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_UNIT_END = r"(?![\w'])(?:(?<![mgl])\.(?= [a-z=+]))?"  # metric symbols such as km are written without a period
_FIGURE_2 = r"(?<=[^A-Za-z]m|[cdkmn]m|ft|mi)[23]"
_RULES = rules(
    (r"(?<![\w.+-])(\d{4})([-/.])(\d\d?)\2(\d\d?)(?:T(?=\d)|(?![\w/-]|\.\d))",
     lambda match: _date(match[1], match[3], match[4]) or match[0]),
    (r"(?<![\w./-])(\d{1,2})([/.-])(\d{1,2})\2(\d{4}|(?<=/)\d\d)(?![\w/-]|\.\d)", _date_in_figures),
    (rf"\b({_MONTH})-(\d{{1,2}})(?:-(?=\d{{4}}(?!\w))|(?![\w-]))", r"\1 \2, "),
    (rf"(?<![\w./-])(\d{{1,2}})([-/])({_MONTH})\2(?=\d{{2,4}}(?!\w))", r"\1 \3 "),
    (r"(?<!\w)\+\d(?:[ ./-]{0,2}\d){6,14}(?!\w)", _groups),
    (r"(?<![\w-])(?:1[ .-])?\d{3}[ .-]\d{3}[ .-]\d{4}(?![\w-])", _groups),
    (r"(?<![\w.,-])(?:0\d{1,4}(?:[ -]\d{3,4}){2}|0\d{1,4}[ -]\d{6,8}|0\d(?:[ .-]\d\d){4})(?![\w-])", _groups),
    (r"(?<![\w.,-])1-8(00|88|77|66|55|44|33)-(?=[A-Z]{2})",
     lambda match: f" one eight {'hundred' if match[1] == '00' else digits(match[1])} "),
    (r"(?<![\w.,-])1[38]00[ -]\d{3}[ -]\d{3}(?![\w-])|(?<=[Cc]all |[Dd]ial )(?:911|999|112|988)(?![\w-])", _groups),
    (r"(?<![\w.+-])(?:\d{3}-\d{4}|\d++(?:-\d++){2,}+)(?![\w-])", _groups),
    (r"\b((?:[Cc]ode|CODE|PIN|OTP|otp|[Pp]asscode|[Pp]assword)(?: is| was|:)? )(\d{4,8})(?![\w%]|[.,]\d)",
     lambda match: match[1] + digits(match[2])),
    (r"(?<=\b[A-Z]{2} )(?!\d\d000)\d{5}(?:-\d{4})?(?![\w%-]|[.,]\d)", _groups),
    (r"(?<![\w.,:'-])0(\d[0-5]\d) ?(?:h|hrs|hours)\b", lambda match: f" oh {pairs(match[1])} hours "),
    (rf"(?<![\w.])({_OCTET}(?:\.{_OCTET}){{3}})(?!\.?\d)(?::(\d{{1,5}}))?",
     lambda match: _joined(match[1], " dot ") + (f"port {integer(match[2])} " if match[2] else "")),
    (r"(?<![\w.,])(\d{1,3}(?:[. ]\d{3})+),(\d\d)(?!\d)", _with_commas),
    (r"(?<![\w.,'])(\d{1,3}(?:'\d{3})+|[1-9]\d{0,2}(?:\.\d{3}){2,})(?![\w']|[.,]\d)", _with_commas),
    (rf"{_ALONE}([1-9]\d{{0,2}}(?: \d{{3}}){{2,}}|[1-9]\d{{0,2}} 000|[1-9]\d? \d{{3}})(?![\w-]| \d)", _with_commas),
    (r"(?<=€)(\d++),(\d\d)(?![\d,])", r"\1.\2"),
    (r"(?<![\w.,])(\d++),(\d\d?)(?= ?[€%]| (?:EUR|kg|km|cm|m)\b)", r"\1.\2"),
    (r"(?<![\w.])(\d++(?:\.\d++)?)[eE](\+?-?)(\d{1,3})(?!\w)",
     lambda match: f" {match[1]} times ten to the {'minus ' * (match[2] == '-')}{match[3]} "),
    (rf"(?<![\w.:])(\d\d?)(?::|\.(?=\d\d ?[apAP]\.?[mM])|h(?=\d\d\b))(\d\d)(?::(\d\d))?(?![\d:]){_HALF_OR_NOT}", _time),
    (r"(?<=\d):(?=\d)", " to "),
    (r"(?<![\w.,])(\d{1,3})h ?(\d\d?)m(?: ?(\d\d?)s)?\b|(?<![\w.,])(\d{1,3})m ?(\d\d?)s\b", _duration),
    (rf"(?<![\w.:,])(\d{{1,2}}) ?{_HALF_OF_DAY}", lambda match: f" {cardinal(int(match[1]))} {match[2].upper()} M"),
    (rf"\b({_MONTH}) {_DAY}(?:{_DASH}{_DAY})?(?![\w/:%]|[.,]\d)",
     lambda match: f" {MONTH_OF[match[1][:3].title()]} {_days(match[2], match[3])} "),
    (rf"(?<![\w.,/:-]){_DAY}(?:{_DASH}{_DAY})? ({_MONTH}|(?:may|march)(?= \d{{4}}))(?![\w'])",
     lambda match: f" {_days(match[1], match[2])} of {MONTH_OF[match[3][:3].title()]} "),
    (rf"\b({_MONTH})(?= \d)", lambda match: f" {MONTH_OF[match[1][:3].title()]}"),
    (rf"({_CURRENCY}) ?({_AMOUNT}){_DASH}(?=\d)(?![^ ]*\.\d|\d{{1,3}}\.)", r"\2 to \1"),
    (rf"{RANGED}{_DASH}(?={_CURRENCY}?\d)", " to "),
    (rf"(?<!\S)-(?={_CURRENCY}?\.?\d)", "minus "),
    (rf"(?:\b([Aa]n?|[Aa]nother) )?({_CURRENCY}) ?({_AMOUNT}){_SCALE}(?: dollars\b)?", _price),
    (rf"({_NUMBER}) ?({_CURRENCY})(?!\w)", lambda match: _amount(match[1], match[2])),
    (rf"({_NUMBER})¢", lambda match: f" {decimal(match[1])} cent{'s' * (match[1] != '1')} "),
    (rf"(?<![\w.,])(?:({_OF_DECADES})[ -])?('?)((?:1[1-9]|20|[1-9])?[1-9]0|[12]?\d00)s(?![\w'])", _decade),
    (r"(?<=\b[Aa] )(5|8|10|12|15|20|50|100)k(?![\w'])", r"\1 K"),
    (rf"({_NUMBER})(k| B)(?![\w']| [A-Z]\b)", lambda match: f" {decimal(match[1])} {_SCALES[match[2][-1].lower()]} "),
    (rf"(?<=\d) (thousand|million|billion) ({_UNIT})(?![\w'])", lambda match: f" {match[1]} {_UNITS[match[2]][1]} "),
    (r"(?<![\w./])(\d++\.\d++)/(10|100|5)(?![\w/]|\.\d)", r"\1 out of \2"),
    (r"(?<![\w./])((?:19|20)\d\d)/(?=\d\d(?![\w/]))", r"\1 "),
    (r"(?<![\w./])(?:24/7|50/50|20/20|9/11)(?![\w/]|\.\d)", lambda match: match[0].replace("/", " ")),
    (rf"(?<![\w./])(?:(\d++) )?(\d++)/(\d++)(?:th|rd|st|nd|TH|RD)?(?![\w/])(?: ?({_UNIT})(?![\w'/]))?", _fraction),
    (rf"(?:\b([Aa]n?) )?({_NUMBER})(?: |(-))?({_UNIT})([²³]|{_FIGURE_2})?(?:/({_UNIT})([²³])?)?{_UNIT_END}", _measure),
    (r"(?<![\w/.])(km|mi|m|[kMGT]B|kg|mg|g)()/(h|s|l|dl|ml|kg)(?![\w/])", lambda match: f" {_unit(*match.groups())} "),
    (rf"(?:(?<=[a-z]{{3}})|(?<=\d)|(?<=\d[kKMB])|(?<=\w )) ?/{_PERIOD}",
     lambda match: f" {'per ' * (match[1] != 'ea')}{_PERIODS.get(match[1]) or _UNITS[match[1]][0]} "),
    (r"(?<![\w.,])(\d{1,3}(?:,\d{3}){1,4}|\d{1,9})(?:st|nd|rd|th|ST|ND|RD|TH)(?![\w'])",
     lambda match: f" {ordinal(int(match[1].replace(',', '')))} "),
    (r"(?:(?<=[Ii]n )|(?<=ear ))(10[1-9]\d)(?![\w%]|[.,]\d)", lambda match: pairs(match[1])),
    (r"(?<=[A-Z])-?([1-9]\d{2,3})(?![\w%]|[.,]\d)|(?<=[A-Z]{2} )([1-9]\d{3})(?![\w%]|[.,]\d)",
     lambda match: f" {pairs(match[1] or match[2])} "),
    (r"(?<!\d)\d++(?:\.\d++){2,}+|(?<=[Ff]igure |ersion |ection |hapter |Python )\d++\.[1-9]\d++",
     lambda match: _joined(match[0], " point ", 2)),
    (rf"(?<!\d){_WHOLE}(?:\.\d++)*+|(?<!\w)\.\d++", _plain),
    (r"(?<=[a-z]) (?='s\b)", ""),
)  # fmt: skip
