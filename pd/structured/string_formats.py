"""Patterns for string formats of JSON schemas that xgrammar's own patterns do not enforce.

xgrammar 0.2.8 accepts February 31 as a date, 60 seconds, ``01.1.1.1`` as an address, and characters
that break JSON in JSON pointers and e-mail addresses.
"""

from __future__ import annotations

# Multiples of 4 except 0, in two digits.
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
# The calendar and Python's dates have no year 0.
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR, _SIXTIETH = "([01][0-9]|2[0-3])", "[0-5][0-9]"
# NOTE: We allow no leap seconds, because only some days have one.
_TIME = f"{_HOUR}:{_SIXTIETH}:{_SIXTIETH}(\\.[0-9]+)?(Z|[+\\-]{_HOUR}:{_SIXTIETH})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"({_BYTE}\\.){{3}}{_BYTE}"
_WORD = "[0-9a-fA-F]{1,4}"
# An address with ``::`` has at most seven words before and after it. It ends with an IPv4 address
# only if its prefix says so.
_IPV6 = "|".join(
    (
        f"({_WORD}:){{7}}{_WORD}",
        "::",
        f"({_WORD}:){{1,7}}:",
        f"::({_WORD}:){{0,6}}{_WORD}",
        f"::(ffff:)?{_IPV4}",
        *(f"({_WORD}:){{1,{count}}}:({_WORD}:){{0,{6 - count}}}{_WORD}" for count in range(1, 7)),
    )
)
# NOTE: We do not limit the length, because compiling is slow for each counted character.
_LABEL = "[A-Za-z0-9]([A-Za-z0-9\\-]*[A-Za-z0-9])?"
_HOST = f"{_LABEL}(\\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?\\^_`{|}~\\-]+"

# Patterns by the name of the format.
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^({_IPV6})$",
    # NOTE: We allow no quoted names, because JSON escapes their quotes.
    "email": f"^{_ATOM}(\\.{_ATOM})*@{_HOST}$",
    "json-pointer": "^(/([^/~]|~[01])*)*$",
}
