"""What machines cost: a small table of published prices, overlaid with the user's own.

Prices are US dollars per hour of the whole machine, and per request to the store. They are quotes with a source, not a
provider's bill; for accounting, name your own prices (GLEANER_PRICES, docs/guide). This module knows nothing of pools,
Flyte or runs.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from resources.documents import DocumentError, read_document

PRICES_VARIABLE = "GLEANER_PRICES"
_SECONDS_PER_HOUR = 3600.0
# Dollars per request of S3 Standard in us-east-1 (aws.amazon.com/s3/pricing: $0.005 per 1,000 PUT or LIST, $0.0004 per
# 1,000 GET). Reading within the region and deleting cost nothing.
PUT_USD = 5e-6
GET_USD = 4e-7
# Providers charge for requests to stores with these urls.
PRICED_SCHEME = "s3://"
# This entry of a price file is not a machine.
REQUESTS = "requests"
Entries = TypeVar("Entries")
_Name = Annotated[str, Field(min_length=1)]
_UsdPerHour = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PricesError(ValueError):
    """A price file that cannot be used."""


class UnknownMachine(PricesError, LookupError):  # noqa: N818 - reads as what happened
    """A machine without a price."""


@dataclass(frozen=True, kw_only=True)
class MachinePrice:
    """The price of a machine per hour, on demand and interruptible, with its source."""

    machine: str
    provider: str
    accelerator: str
    gpus: int
    on_demand_usd_per_h: float
    spot_usd_per_h: float
    source: str
    as_of: str

    def usd_per_h(self, interruptible: bool) -> float:
        """Price of the whole machine in US dollars per hour."""
        return self.spot_usd_per_h if interruptible else self.on_demand_usd_per_h

    def usd_per_gpu_h(self, interruptible: bool) -> float:
        """Price of one of its accelerators in US dollars per hour; of the whole machine if it has none."""
        return self.usd_per_h(interruptible) / max(1, self.gpus)


@dataclass(frozen=True, kw_only=True)
class RequestPrices:
    """US dollars per request to the store: per PUT or LIST, and per GET."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    put_usd: _UsdPerHour = PUT_USD
    get_usd: _UsdPerHour = GET_USD

    def usd(self, puts: int, gets: int) -> float:
        """Dollars for this many requests."""
        return puts * self.put_usd + gets * self.get_usd


_SKYPILOT_AWS = "skypilot-org/skypilot-catalog, catalogs/v8/aws/vms.csv"
_SKYPILOT_NEBIUS = "skypilot-org/skypilot-catalog, catalogs/v8/nebius/vms.csv"
_AWS_REVISION = "commit 00148f2; on-demand prices seen again on 2026-11-09"

# AWS: us-east-1, us-east-2 and us-west-2. If a source quotes several zones, each figure is their median, including
# zones whose spot price equals the on-demand price.
PRICES: tuple[MachinePrice, ...] = (
    MachinePrice(
        machine="p5.48xlarge",
        provider="aws",
        accelerator="H100-80GB",
        gpus=8,
        on_demand_usd_per_h=55.04,
        spot_usd_per_h=14.5543,  # 14 zones: 10.24 to 55.04
        source=_SKYPILOT_AWS,
        as_of=_AWS_REVISION,
    ),
    MachinePrice(
        machine="p5en.48xlarge",
        provider="aws",
        accelerator="H200",
        gpus=8,
        on_demand_usd_per_h=63.296,
        spot_usd_per_h=26.9369,  # 3 regions: 26.57 to 27.20
        source="dstackai/dstack, pull request 4110 (output of `dstack offer`)",
        as_of="2026-08-06",
    ),
    MachinePrice(
        machine="p4de.24xlarge",
        provider="aws",
        accelerator="A100-80GB",
        gpus=8,
        on_demand_usd_per_h=27.44705,
        spot_usd_per_h=10.3338,  # 5 zones: 8.65 to 11.01
        source=_SKYPILOT_AWS,
        as_of=_AWS_REVISION,
    ),
    MachinePrice(
        machine="p4d.24xlarge",
        provider="aws",
        accelerator="A100-40GB",
        gpus=8,
        on_demand_usd_per_h=21.95764,
        spot_usd_per_h=8.1203,  # 11 zones: 2.47 to 21.85
        source=_SKYPILOT_AWS,
        as_of=_AWS_REVISION,
    ),
    MachinePrice(
        machine="g6.xlarge",
        provider="aws",
        accelerator="L4",
        gpus=1,
        on_demand_usd_per_h=0.8048,
        spot_usd_per_h=0.39,  # 11 zones: 0.26 to 0.45
        source=_SKYPILOT_AWS,
        as_of="commit 00148f2",
    ),
    MachinePrice(
        machine="gpu-h100-sxm_8gpu-128vcpu-1600gb",
        provider="nebius",
        accelerator="H100-80GB",
        gpus=8,
        on_demand_usd_per_h=23.60,
        spot_usd_per_h=10.00,
        source=_SKYPILOT_NEBIUS,
        as_of="commit 0082b04",
    ),
    MachinePrice(
        machine="gpu-h200-sxm_8gpu-128vcpu-1600gb",
        provider="nebius",
        accelerator="H200",
        gpus=8,
        on_demand_usd_per_h=28.00,
        spot_usd_per_h=11.60,
        source=_SKYPILOT_NEBIUS,
        as_of="commit 0082b04",
    ),
)


@dataclass(frozen=True, kw_only=True)
class _OwnPrice:
    """One entry of a price file; the key is the machine's name."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    on_demand_usd_per_h: _UsdPerHour
    spot_usd_per_h: _UsdPerHour
    gpus: Annotated[int, Field(ge=0)]
    provider: str = ""
    accelerator: str = ""
    as_of: str = ""


_OWN_PRICES: TypeAdapter[dict[str, _OwnPrice]] = TypeAdapter(dict[_Name, _OwnPrice])
_OWN_REQUESTS: TypeAdapter[RequestPrices] = TypeAdapter(RequestPrices)


def price_table(prices_path: Path | str | None = None) -> Mapping[str, MachinePrice]:
    """The built-in prices by machine, overlaid with the entries of a price file.

    Args:
        prices_path: A JSON or YAML file that maps machine names to `on_demand_usd_per_h`, `spot_usd_per_h` and `gpus`
            (and, if known, `provider`, `accelerator`, `as_of`), and `requests` to `put_usd` and `get_usd`. None: the
            file named by GLEANER_PRICES, if any.

    Raises:
        PricesError: The file is missing or invalid; the message names the file, the field and the allowed values.
    """
    return {price.machine: price for price in PRICES} | _own_prices(prices_path)[0]


def request_prices(store_url: str, prices_path: Path | str | None = None) -> RequestPrices:
    """The prices of requests to the store at `store_url`; raises what price_table raises.

    On S3 they come from the price file, or else from S3's list. Requests to any other store cost nothing, because the
    machine of the store is paid for already.
    """
    own = _own_prices(prices_path)[1]
    return own if store_url.lower().startswith(PRICED_SCHEME) else RequestPrices(put_usd=0.0, get_usd=0.0)


def machine_price(machine: str, prices_path: Path | str | None = None) -> MachinePrice:
    """The entry of `machine`; raises UnknownMachine, which lists the known ones."""
    table = price_table(prices_path)
    if machine not in table:
        known = ", ".join(sorted(table))
        raise UnknownMachine(f"machine: no price for {machine!r}; known: {known} (add others with {PRICES_VARIABLE})")
    return table[machine]


def dollars(duration_s: float, usd_per_h: float) -> float:
    """US dollars for `duration_s` seconds at an hourly price."""
    return duration_s * usd_per_h / _SECONDS_PER_HOUR


def _own_prices(prices_path: Path | str | None) -> tuple[dict[str, MachinePrice], RequestPrices]:
    """The prices in the file given, else in the one that the environment names, else none."""
    given = prices_path if prices_path is not None else os.environ.get(PRICES_VARIABLE) or None
    if given is None:
        return {}, RequestPrices()
    path = Path(given)
    document = _read_document(path)
    machines, requests = document, {}
    if isinstance(document, dict) and REQUESTS in document:
        machines = {name: entry for name, entry in document.items() if name != REQUESTS}
        requests = document[REQUESTS]
    return _machine_prices(path, machines), _validated(path, _OWN_REQUESTS, requests, (REQUESTS,))


def _machine_prices(path: Path, document: object) -> dict[str, MachinePrice]:
    entries = _validated(path, _OWN_PRICES, document)
    return {
        machine: MachinePrice(
            machine=machine,
            provider=entry.provider,
            accelerator=entry.accelerator,
            gpus=entry.gpus,
            on_demand_usd_per_h=entry.on_demand_usd_per_h,
            spot_usd_per_h=entry.spot_usd_per_h,
            source=str(path),
            as_of=entry.as_of,
        )
        for machine, entry in entries.items()
    }


def _validated(path: Path, adapter: TypeAdapter[Entries], document: object, at: tuple[str, ...] = ()) -> Entries:
    """The document as `adapter` reads it; raises PricesError, whose field name begins with `at`."""
    try:
        return adapter.validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in (*at, *first["loc"])) or "the document"
        raise PricesError(f"{path}: {where}: value {first['input']!r}; {first['msg']}") from None


def _read_document(path: Path) -> object:
    """The file's content as plain JSON values."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise PricesError(f"{path}: file type {path.suffix!r}; allowed: .json, .yaml, .yml")
    try:
        found: object = read_document(path)
    except DocumentError as error:
        raise PricesError(f"{path}: {error}") from None
    return found
