"""The version of this package. A phase is trained by the version that recorded it (docs/format.md section 11).

The build reads only this file, and images copy the file ahead of the remaining code.
"""

VERSION = "0.1.0"
