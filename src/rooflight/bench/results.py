"""Results on disk: JSON with everything, CSV with the rows. Never read at run time."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rooflight.bench.environment import gpu_folder


def prepare(folder: Path) -> None:
    """Make the folder; OSError naming it if that cannot be done or nothing may be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def file_name(folder: Path, kind: str, dtypes: Sequence[str], usual: str, device: object) -> str:
    """`kind`, with the dtypes unless the `usual` one is among them: results of another dtype are not overwritten.

    device: of the run's environment. It is added where the file of that name in the folder is of another device.
    """
    name = kind if usual in dtypes else "-".join([kind, *dtypes])
    before = _device(folder / f"{name}.json")
    return name if before in (None, device) else f"{name}-{gpu_folder(str(device))}"


def _device(path: Path) -> object:
    """Of a results file; None where there is no such file."""
    try:
        data = json.loads(path.read_text())
        return data["environment"]["device"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path, name: str, data: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `name`.json and `name`.csv (the rows, nested values as dotted columns) into the folder."""
    prepare(folder)
    as_json, as_csv = folder / f"{name}.json", folder / f"{name}.csv"
    as_json.write_text(json.dumps(data, indent=1) + "\n")
    rows = [_flat(row) for row in data["rows"]]
    with as_csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=_columns(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return as_json, as_csv


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))
