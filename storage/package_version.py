"""The version of this package. A phase is trained by the version that recorded it (docs/format.md section 11)."""

VERSION = "0.1.0"
