"""The version of this package. A phase is trained by the version that recorded it (docs/format.md section 11).

The build reads this file alone, and images copy it ahead of all other code.
"""

VERSION = "0.1.0"
