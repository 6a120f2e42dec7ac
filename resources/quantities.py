"""Quantities as Kubernetes writes them: amounts of CPU and memory with suffixes such as m, Gi or e3."""

import re
from decimal import Decimal
from fractions import Fraction

_QUANTITY = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(?:([KMGTPE]i)|([numkMGTPE]?)|[eE]([+-]?[0-9]{1,3}))")
_POWERS_OF_10 = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_POWERS_OF_2 = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
# An API server counts in 64 bits with a sign and cuts off what is larger.
LARGEST = (1 << 63) - 1


def amount(text: str) -> Fraction:
    """The number that a quantity stands for: cores of CPU, bytes of memory. At most LARGEST.

    Raises ValueError for what a Kubernetes API server does not take as a request: text that is no quantity, an exponent
    of more than three digits, and a negative amount.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError("allowed: a Kubernetes quantity, such as 3, '500m' or '12Gi'")
    sign, number, binary, decimal, exponent = found.groups()
    if binary is not None:
        value = Fraction(Decimal(number)) * (1 << _POWERS_OF_2[binary])
    else:
        value = Fraction(Decimal(number)) * Fraction(10) ** int(exponent or _POWERS_OF_10[decimal or ""])
    if sign == "-" and value:
        raise ValueError("allowed: a Kubernetes quantity of at least 0")
    return min(value, Fraction(LARGEST))


def quantity_text(given: object) -> object:
    """A quantity of a configuration as text; YAML and JSON give one without a suffix as a number.

    Raises ValueError for what an API server refuses.
    """
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise ValueError("allowed: a Kubernetes quantity, such as 3, '500m' or '12Gi'")  # noqa: TRY004 - for pydantic
    # An API server, too, ignores blanks around a quantity.
    text = str(given).strip()
    amount(text)
    return text
