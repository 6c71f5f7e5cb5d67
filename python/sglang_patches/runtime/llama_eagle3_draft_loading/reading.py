"""A draft's configuration, as upstream's ``get_config`` gives it, in upstream's words."""

from __future__ import annotations

import functools
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_patches.draft import conventions
from sglang_patches.draft.checkpoint import UnreadableCheckpoint, local_folder, read_headers
from sglang_patches.draft.refusal import CONTRACT, DraftContractError, only_warns

PATCH = "llama-eagle3-draft-loading"

logger = logging.getLogger("sglang_patches")


def refuse(path: str, reasons: list[str]) -> None:
    """Raise DraftContractError with all `reasons`, or log them where `CONTRACT` is ``warn``."""
    told = "".join(f"\n  - {reason}" for reason in reasons)
    message = (
        f"the EAGLE-3 draft {path} cannot be loaded:{told}\n"
        f"  remedy: see what it is with `sglang-patches draft check TARGET {path}`, or serve without "
        f"--speculative-algorithm; {CONTRACT}=warn starts the server all the same"
    )
    if not only_warns():
        raise DraftContractError(message)
    logger.warning("sglang-patches: %s: %s", PATCH, message)


def _read(model: Any, revision: str | None) -> conventions.Reading | None:
    """The reading of a draft whose files are on this machine; None for all other models, and where nothing is read."""
    folder = local_folder(str(model), revision, None)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
    except (OSError, ValueError):
        return None  # upstream will tell
    if not isinstance(raw, dict) or conventions.architecture(raw) is None:
        return None
    assert folder is not None
    try:
        checkpoint = read_headers(folder)
    except UnreadableCheckpoint:
        checkpoint = None  # whoever loads it, or patch kimi-k25-eagle3-delegation, will tell
    return conventions.read_config(raw, checkpoint.tensors if checkpoint else None)


def reads_drafts(get_config: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate upstream's ``get_config``: the configuration of an EAGLE-3 draft comes in upstream's words.

    It has ``draft_reading`` then: ``{"told": [...]}``, what was read in another way than upstream alone would.

    Raises DraftContractError for a configuration that upstream cannot be told.
    """

    @functools.wraps(get_config)
    def read(model: Any, trust_remote_code: bool, revision: str | None = None, *args: Any, **kwargs: Any) -> Any:
        def ask(where: Any = model, at: str | None = revision) -> Any:
            return get_config(where, trust_remote_code, at, *args, **kwargs)

        if kwargs.get("_configuration_file"):
            return ask()  # a configuration that is not the folder's own
        reading = _read(model, revision)
        if reading is None:
            try:
                config = ask()
            except (OSError, ValueError):
                reading = _read(model, revision)
                if reading is None:
                    raise
            else:
                reading = _read(model, revision)  # its config.json may only now be on this machine
                if reading is None:
                    return config
        if reading.refused:
            refuse(str(model), reading.refused)
            return ask()
        if reading.nested:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(reading.config), encoding="utf-8")
                config = ask(folder, None)
            config._name_or_path = str(model)
        else:
            config = ask()
            override = kwargs.get("model_override_args") or (args[0] if args else None) or {}
            for key, found in reading.changed.items():
                if key not in override:
                    setattr(config, key, found)
        config.draft_reading = {"told": list(reading.told)}
        return config

    return read
