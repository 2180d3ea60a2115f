"""`gradfit build-native`: compile the native core for this torch and this Python."""

from __future__ import annotations

import json as json_format

from gradfit._torch_native import build
from gradfit.cli.command_options import Debug, Json
from gradfit.cli.console import print_result, working


def build_native(json: Json = False, debug: Debug = False) -> None:
    """Compile the native core, which records operations faster, once for this torch and this
    Python. It needs a C++ compiler, and about a minute.
    """
    with working("compiling"):
        built = build()
    said = f"{built}\nProcesses that start from now on use it; GRADFIT_NATIVE=0 says not to."
    print_result(json_format.dumps({"built": str(built)}) if json else said)
