"""Numbers in English text, spoken: dates, times, money, measures, telephone numbers and all other numbers."""

import re
from collections.abc import Callable
from functools import lru_cache

from num2words import num2words

LARGEST_DIGITS = 15  # an integer of more digits is not read as a whole: hundreds of trillions
_PLAIN_DIGITS = 6  # longer digit strings without separators are codes, unless they are round


def cardinal(number: int) -> str:
    """`0 <= number < 10**LARGEST_DIGITS`, without "and": one hundred five."""
    return _words(number, "cardinal")


def ordinal(number: int) -> str:
    """Twenty-first for 21; the range is `cardinal`'s."""
    return _words(number, "ordinal")


def year(number: int) -> str:
    """Nineteen oh five, two thousand five, twenty twenty-six; outside 1100 to 2099 the cardinal."""
    return _words(number, "year").replace("oh-", "oh ") if 1100 <= number < 2100 else cardinal(number)


@lru_cache(maxsize=4096)
def _words(number: int, kind: str) -> str:
    words: str = num2words(number, to=kind)
    return words.replace(" and ", " ").replace(",", "")


def plural(words: str) -> str:
    """The words with the last one in the plural: nineteen nineties."""
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def digits(figures: str) -> str:
    """One word a digit; anything between them is left out."""
    return " ".join(cardinal(int(figure)) for figure in figures if figure.isdigit())


def integer(figures: str) -> str:
    """A digit string, with or without thousands separators.

    Numbers with a leading zero, and long ones that are neither separated nor round, are codes: digit by digit.
    """
    plain = figures.replace(",", "")
    long = len(plain) > _PLAIN_DIGITS and plain == figures and not plain.endswith("000")
    if len(plain) > LARGEST_DIGITS or long or (plain[0] == "0" and len(plain) > 1):
        return digits(plain)
    return cardinal(int(plain))


def decimal(figures: str) -> str:
    """An integer, or one with decimals: three point one four. Further points are read too."""
    whole, *parts = figures.split(".")
    return " point ".join((integer(whole or "0"), *(digits(part) for part in parts)))


# A repetition never gives back what it took (`++`) and starts where no other could: time stays linear in the text.
_WHOLE = r"(?:\d{1,3}(?:,\d{3}){1,4}(?!\d)|\d++)"
_NUMBER = rf"(?<![\w.])(?:{_WHOLE}(?:\.\d++)?|\.\d++)"
_HALF_OF_DAY = r"([aApP])[mM](?![\w'])"

_CALENDAR = "January February March April May June July August September October November December"
_MONTHS = _CALENDAR.split()
_MONTH = "|".join(f"{name}|{name[:3]}\\b\\.?" for name in _MONTHS) + r"|Sept\b\.?"

_SCALES = {"k": "thousand", "m": "million", "mn": "million", "b": "billion", "bn": "billion", "t": "trillion"}
_SCALES |= {"tn": "trillion"} | {name: name for name in ("thousand", "million", "billion", "trillion")}
_CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"),
    "¥": ("yen", "yen", "sen", "sen"),
    "₹": ("rupee", "rupees", "paisa", "paise"),
}
_CURRENCY = f"[{''.join(_CURRENCIES)}]"

_UNITS = {
    "km": "kilometer", "m": "meter", "cm": "centimeter", "mm": "millimeter", "μm": "micrometer", "nm": "nanometer",
    "mi": "mile", "yd": "yard", "kg": "kilogram", "g": "gram", "mg": "milligram", "μg": "microgram", "lb": "pound",
    "lbs": "pound", "oz": "ounce", "l": "liter", "L": "liter", "ml": "milliliter", "mL": "milliliter",
    "h": "hour", "hr": "hour", "hrs": "hour", "min": "minute", "mins": "minute", "s": "second", "sec": "second",
    "secs": "second", "ms": "millisecond", "μs": "microsecond", "ns": "nanosecond", "V": "volt", "W": "watt",
    "kW": "kilowatt", "MW": "megawatt", "kWh": "kilowatt-hour", "KB": "kilobyte", "kB": "kilobyte", "MB": "megabyte",
    "GB": "gigabyte", "TB": "terabyte", "PB": "petabyte", "GiB": "gibibyte", "MiB": "mebibyte",
    "dB": "decibel", "px": "pixel",
}  # fmt: skip
_SPOKEN_UNITS = {symbol: (name, plural(name)) for symbol, name in _UNITS.items()} | {
    "ft": ("foot", "feet"),
    "km/h": ("kilometer per hour", "kilometers per hour"),
    "kph": ("kilometer per hour", "kilometers per hour"),
    "mph": ("mile per hour", "miles per hour"),
    "m/s": ("meter per second", "meters per second"),
    "kbps": ("kilobit per second", "kilobits per second"),
    "Mbps": ("megabit per second", "megabits per second"),
    "Gbps": ("gigabit per second", "gigabits per second"),
    "fps": ("frame per second", "frames per second"),
    "rpm": ("revolution per minute", "revolutions per minute"),
    "Hz": ("hertz", "hertz"),
    "kHz": ("kilohertz", "kilohertz"),
    "MHz": ("megahertz", "megahertz"),
    "GHz": ("gigahertz", "gigahertz"),
    "°C": ("degree Celsius", "degrees Celsius"),
    "°F": ("degree Fahrenheit", "degrees Fahrenheit"),
    "°": ("degree", "degrees"),
    "M": ("million", "million"),
}
_UNIT = "|".join(sorted(map(re.escape, _SPOKEN_UNITS), key=len, reverse=True))


def speak_numbers(text: str) -> str:
    """`text`, one line of folded characters, with every number as words. No digit is left.

    Dates with slashes have the month first where it can be one. Four bare digits from 1100 to 2099 are a year.
    """
    for pattern, speak in _RULES:
        text = pattern.sub(speak, text)
    return text


def _date(year_figures: str, month: int, day: int) -> str | None:
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    return f" {_MONTHS[month - 1]} {ordinal(day)}, {year(int(year_figures))} "


def _iso_date(match: re.Match[str]) -> str:
    return _date(match[1], int(match[2]), int(match[3])) or match[0]


def _slash_date(match: re.Match[str]) -> str:
    first, second = int(match[1]), int(match[2])
    return _date(match[3], first, second) or _date(match[3], second, first) or match[0]


def _groups(match: re.Match[str]) -> str:
    """A number in groups, such as a telephone number: digit by digit with a pause after each group."""
    sign = " plus " if match[0].startswith("+") else " "
    return sign + ", ".join(digits(group) for group in re.findall(r"\d+", match[0])) + " "


def _month_day(match: re.Match[str]) -> str:
    day = int(match[2])
    return f" {_month(match[1])} {ordinal(day) if 1 <= day <= 31 else match[2]} "


def _day_month(match: re.Match[str]) -> str:
    day = int(match[1])
    return f" {ordinal(day) if 1 <= day <= 31 else match[1]} of {_month(match[2])} "


def _month(name: str) -> str:
    return next(month for month in _MONTHS if month.startswith(name[:3]))


def _time(match: re.Match[str]) -> str:
    hour, minute = int(match[1]), int(match[2])
    if hour > 24 or minute > 59:
        return f" {cardinal(hour)} to {cardinal(minute)} " + (f"to {cardinal(int(match[3]))} " if match[3] else "")
    words = cardinal(hour)
    if minute:
        words += f" oh {cardinal(minute)}" if minute < 10 else f" {cardinal(minute)}"
    elif not match[4]:
        words += " o'clock" if 1 <= hour <= 12 else " hundred"
    if match[3]:
        words += f" and {cardinal(int(match[3]))} seconds"
    return f" {words} " + (f"{match[4].upper()} M" if match[4] else "")


def _price(match: re.Match[str]) -> str:
    """Currency before the amount, and a scale after it: $5.20, €1m."""
    scale = match[3] or match[4]
    if scale:
        return f" {decimal(match[2])} {_SCALES[scale.lower()]} {_CURRENCIES[match[1]][1]} "
    return _amount(match[2], match[1])


def _amount(figures: str, currency: str) -> str:
    one, many, one_cent, cents = _CURRENCIES[currency]
    whole, _, part = figures.partition(".")
    if len(part) != 2:
        return f" {decimal(figures)} {one if figures == '1' else many} "
    words = [f"{integer(whole or '0')} {one if whole == '1' else many}"] if whole.strip("0") or part == "00" else []
    if part != "00":
        words.append(f"{cardinal(int(part))} {one_cent if part == '01' else cents}")
    return f" {' and '.join(words)} "


def _measure(match: re.Match[str]) -> str:
    return f" {decimal(match[1])} {_SPOKEN_UNITS[match[2]][match[1] != '1']} "


def _ordinal(match: re.Match[str]) -> str:
    return f" {ordinal(int(match[1].replace(',', '')))} "


def _fraction(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    before = f" {integer(whole)}" if whole else ""
    if len(top) > 2 or len(bottom) > 2 or not 0 < int(top) < int(bottom):
        return f"{before} {integer(top)} over {integer(bottom)} "
    words = f"{cardinal(int(top))} {_part(int(bottom), one=int(top) == 1)} "
    return f"{before} and {words}" if before else f" {words}"


def _part(bottom: int, *, one: bool) -> str:
    if bottom == 2:
        return "half"  # one half is the only proper one
    name = "quarter" if bottom == 4 else ordinal(bottom)
    return name if one else plural(name)


def _plain(match: re.Match[str]) -> str:
    figures = match[0]
    is_year = len(figures) == 4 and figures.isdigit() and figures[0] != "0"
    return f" {year(int(figures)) if is_year else decimal(figures)} "


Speak = Callable[[re.Match[str]], str]

_RULES: tuple[tuple[re.Pattern[str], Speak], ...] = (
    (re.compile(r"(?<![\w.+-])(\d{4})-(\d\d)-(\d\d)(?:T(?=\d)|(?![\w-]))"), _iso_date),
    (re.compile(r"(?<![\w./-])(\d{1,2})/(\d{1,2})/(\d{4})(?![\w/-])"), _slash_date),
    (re.compile(r"(?<!\w)\+\d(?:[ ./-]{0,2}\d){6,14}(?!\w)"), _groups),
    (re.compile(r"(?<![\w-])\d{3}[ .-]\d{3}[ .-]\d{4}(?![\w-])"), _groups),
    (re.compile(r"(?<![\w.+-])(?:\d{3}-\d{4}|\d++(?:-\d++){2,}+)(?![\w-])"), _groups),
    (re.compile(rf"(?<![\w.:])(\d{{1,2}}):(\d\d)(?::(\d\d))?(?![\d:])(?: ?{_HALF_OF_DAY})?"), _time),
    (re.compile(r"(?<=\d):(?=\d)"), lambda match: " to "),
    (
        re.compile(rf"(?<![\w.:,])(\d{{1,2}}) ?{_HALF_OF_DAY}"),
        lambda match: f" {cardinal(int(match[1]))} {match[2].upper()} M",
    ),
    (re.compile(rf"\b({_MONTH}) (\d{{1,2}})(?:st|nd|rd|th)?(?![\w/:%]|[.,]\d)"), _month_day),
    (re.compile(rf"(?<![\w.,/:-])(\d{{1,2}})(?:st|nd|rd|th)? ({_MONTH})(?![\w'])"), _day_month),
    (re.compile(rf"\b({_MONTH})(?= \d)"), lambda match: f" {_month(match[1])}"),
    (re.compile(r"(?<=\d) ?- ?(?=[$£€¥₹]?\d)"), lambda match: " to "),
    (re.compile(r"(?<!\S)-(?=[$£€¥₹]?\.?\d)"), lambda match: "minus "),
    (
        re.compile(
            rf"({_CURRENCY}) ?({_WHOLE}(?:\.\d++)?|\.\d++)"
            r"(?:(?: ?(thousand|million|billion|trillion|[mbt]n)|([kKmMbBtT]))(?![\w']))?"
        ),
        _price,
    ),
    (re.compile(rf"({_NUMBER}) ?({_CURRENCY})"), lambda match: _amount(match[1], match[2])),
    (
        re.compile(r"(?<![\w.,])'?((?:1[1-9]|20)?[1-9]0|[12]\d00)s(?![\w'])"),
        lambda match: f" {plural(year(int(match[1])))} ",
    ),
    (re.compile(rf"({_NUMBER})k(?![\w'])"), lambda match: f" {decimal(match[1])} thousand "),
    (re.compile(rf"({_NUMBER}) ?({_UNIT})(?![\w'])"), _measure),
    (re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3}){1,4}|\d{1,9})(?:st|nd|rd|th)(?![\w'])"), _ordinal),
    (re.compile(r"(?<![\w./])(?:(\d++) )?(\d++)/(\d++)(?![\w/])"), _fraction),
    (re.compile(rf"(?<!\d){_WHOLE}(?:\.\d++)*+|(?<!\w)\.\d++"), _plain),
)
