"""Joins the draft contract to upstream's start-up: in the launching process before anything is spawned, and again in
each scheduler before it loads the target, for starts that do not pass through ``Engine._launch_subprocesses``."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_patches import lane
from sglang_patches.draft import roles, shapes
from sglang_patches.draft.checkpoint import (
    Checkpoint,
    UnreadableCheckpoint,
    local_config,
    local_folder,
    read_headers,
)
from sglang_patches.draft.contract import Finding, Pair, check
from sglang_patches.draft.refusal import DraftContractError, message
from sglang_patches.draft.shapes import value
from sglang_patches.runtime import _outcome, _ranks
from sglang_patches.runtime.kimi_k25_eagle3_delegation.settings import CONTRACT, alarm_settings, only_warns

PATCH = "kimi-k25-eagle3-delegation"
WRAPPER = "KimiK25ForConditionalGeneration"

logger = logging.getLogger("sglang_patches")


@dataclass
class Checked:
    """What a scheduler knows of its draft; one that does not fit (`fits` false) is served because it was asked for.

    `headers` reads those of the draft again: None until its files are on this machine.
    """

    pair: Pair
    headers: Callable[[], Checkpoint | None]
    figures: dict[str, Any] = field(default_factory=dict)
    fits: bool = True

    def record(self, detail: str) -> None:
        """Tell the outcome: `detail` of a draft that fits."""
        if self.fits:
            _outcome.record(PATCH, "applied", detail, **self.figures)
        else:
            _outcome.record(PATCH, "failed", f"the draft does not fit, served by {CONTRACT}=warn", **self.figures)


_checked: list[Checked] = []


def checked() -> Checked | None:
    """The draft that this scheduler checked; None without EAGLE-3."""
    return _checked[-1] if _checked else None


def refuse(path: str, target: str, reasons: list[str], remedy: str = "") -> None:
    """Raise DraftContractError with all `reasons`, or log them where `CONTRACT` is ``warn``; as `refusal.message`."""
    told = message(path, target, reasons, remedy)
    if not only_warns():
        raise DraftContractError(told)
    warn(told)


def warn(message: str) -> None:
    """Log `message` once a server, not once a rank: all ranks check the same."""
    if _ranks.is_first():
        logger.warning("sglang-patches: %s: %s", PATCH, message)


def headers_of(server_args: Any, draft: Any) -> Checkpoint | None:
    """The headers of the draft that upstream's ``ModelConfig`` `draft` is of, where they are on this machine."""
    folder = local_folder(draft.model_path, draft.revision, server_args.download_dir)
    return read_headers(folder) if folder else None


def make_pair(server_args: Any, target: Any, draft: Any, readable: bool = True) -> Pair:
    """The pair of upstream's two ``ModelConfig`` objects; if `readable`, with the draft's headers where they are local.

    Raises `UnreadableCheckpoint`.
    """
    from sglang.srt.environ import envs
    from sglang.srt.utils.common import get_device_sm
    from sglang.utils import is_in_ci

    return Pair(
        draft_path=draft.model_path,
        target_path=target.model_path,
        draft=draft.hf_config,
        target=target.hf_text_config,
        checkpoint=headers_of(server_args, draft) if readable else None,
        context_length=int(target.context_len),
        draft_positions=lane.here().context_length(draft.hf_text_config),
        longer_allowed=bool(envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get() or is_in_ci()),
        served_dtype=str(draft.dtype).removeprefix("torch."),
        # A GPU below sm80 is served in float16, whatever was asked for (`maybe_downgrade_dtype_for_legacy_gpu`).
        target_dtype="" if 0 < get_device_sm() < 80 else str(target.dtype).removeprefix("torch."),
        # Set by patch deepseek-v2-embedding-capture where it is on.
        ids_settled=getattr(draft, "aux_layer_request", None) is not None,
        # Set by patch llama-eagle3-draft-loading where it is on.
        conventions_read=getattr(draft.hf_config, "draft_reading", None) is not None,
    )


def judge(pair: Pair) -> list[Finding]:
    """`check`, logging each warning; raises DraftContractError where the draft cannot work."""
    found = check(pair)
    for finding in found:
        if not finding.refuse:
            warn(f"draft {pair.draft_path}: {finding.text}")
    reasons = [finding.text for finding in found if finding.refuse]
    if reasons:
        remedy = roles.remedy(pair.target, pair.draft, pair.target_path, pair.draft_path)
        refuse(pair.draft_path, pair.target_path, reasons, remedy)
    return found


def _is_eagle3(server_args: Any) -> bool:
    return (server_args.speculative_algorithm or "").upper() == "EAGLE3"


def refuse_misplaced(server_args: Any) -> None:
    """Refuse a target that is a draft, and a draft that is a whole model, where their files are on this machine.

    Also without speculation: upstream would end at the tokenizer, which a draft's folder lacks, without a word of it.

    Raises DraftContractError.
    """
    path = (server_args.speculative_draft_model_path or "") if _is_eagle3(server_args) else ""
    target = local_config(server_args.model_path, server_args.revision, server_args.download_dir)
    revision = server_args.speculative_draft_model_revision if path else None
    draft = local_config(path, revision, server_args.download_dir) if path else None
    reasons = roles.misplaced(target, draft)
    # Where a pair is served all the same, `judge` warns of it with all else.
    if reasons and not (path and only_warns()):
        refuse(path, server_args.model_path, reasons, roles.remedy(target, draft, server_args.model_path, path))


def check_before_spawn(server_args: Any) -> None:
    """In the launching process, before schedulers are spawned (``Engine._launch_subprocesses``).

    Raises DraftContractError; what upstream itself finds wrong with either configuration it raises here too, and early.
    """
    refuse_misplaced(server_args)
    if not _is_eagle3(server_args) or not server_args.speculative_draft_model_path:
        return
    only_warns()
    alarm_settings()
    from sglang.srt.configs.model_config import ModelConfig

    try:
        draft = ModelConfig.from_server_args(
            server_args,
            model_path=server_args.speculative_draft_model_path,
            model_revision=server_args.speculative_draft_model_revision,
            is_draft_model=True,
        )
        pair = make_pair(server_args, ModelConfig.from_server_args(server_args), draft)
    except UnreadableCheckpoint as error:
        refuse(server_args.speculative_draft_model_path, server_args.model_path, [str(error)])
        return
    judge(pair)


def refuse_images_in_context_parallel(server_args: Any, target: Any) -> None:
    """Context-parallel prefill of the wrapper (``EagerRunner._execute_extend_cp``) embeds token ids alone.

    An image's placeholders would be looked up as tokens, so its features never reach the model. Upstream admits the
    combination.

    Args:
        target: upstream's ``ModelConfig`` of the target.

    Raises ValueError.
    """
    if not getattr(server_args, "enable_prefill_cp", False):
        return
    ranks = lane.here().runtime_context().get_parallel().attn_cp_size
    if ranks > 1 and target.is_multimodal and WRAPPER in (target.hf_config.architectures or ()):
        # Not every lane can serve the wrapper without its vision tower.
        has_option = "language_model_only" in lane.here().argument_names()
        text_only = "with --language-model-only to serve text, or " if has_option else ""
        raise ValueError(
            f"{target.model_path} ({WRAPPER}) takes images, and --enable-prefill-cp spreads a prefill over {ranks} "
            "ranks, where upstream embeds the token ids alone and leaves image features out. Start "
            f"{text_only}without --enable-prefill-cp to serve images."
        )


def check_in_worker(config: Any, server_args: Any, target: Any, is_draft_worker: bool) -> None:
    """In a scheduler, before the target is loaded (``resolve_spec_aux_hidden_state_config``).

    Args:
        config: upstream's ``SpecAuxHiddenStateConfig``, resolved.
        target: upstream's ``ModelConfig`` of the target.

    Raises DraftContractError, or ValueError for images with context-parallel prefill.
    """
    if is_draft_worker:
        return
    only_warns()
    alarm_settings()
    refuse_images_in_context_parallel(server_args, target)
    draft = lane.here().draft_model_config(config, server_args) if _is_eagle3(server_args) else None
    if draft is None:
        if reason := roles.no_target(getattr(target, "hf_config", None)):
            refuse("", target.model_path, [reason], roles.remedy(target.hf_config, None, target.model_path, ""))
        _outcome.record(PATCH, "not needed", "no EAGLE-3 draft is served")
        return
    unreadable: list[Finding] = []
    try:
        pair = make_pair(server_args, target, draft)
    except UnreadableCheckpoint as error:
        unreadable = [Finding(True, str(error))]
        refuse(draft.model_path, target.model_path, [str(error)])
        pair = make_pair(server_args, target, draft, readable=False)
    found = [*unreadable, *judge(pair)]
    headers = functools.partial(headers_of, server_args, draft)
    told = Checked(pair, headers, fits=not any(finding.refuse for finding in found))
    told.figures = {
        "draft": pair.draft_path,
        "architecture": pair.architecture,
        "captured_states": shapes.states(pair.draft)[0],
        "draft_vocab": value(pair.draft, "draft_vocab_size", value(pair.draft, "vocab_size")),
        "target_vocab": value(pair.target, "vocab_size"),
        "headers_checked": pair.checkpoint is not None,
        # Where the draft is served although it does not fit, the reasons are among them.
        "warnings": [finding.text for finding in found],
    }
    _checked[:] = [told]
    told.record("the draft fits the target")


def check_what_was_fetched(told: Checked) -> None:
    """After loading: check the headers of a draft whose files were not on this machine before.

    Raises DraftContractError.
    """
    if told.pair.checkpoint is not None:
        return
    try:
        checkpoint = told.headers()
    except UnreadableCheckpoint as error:
        refuse(told.pair.draft_path, told.pair.target_path, [str(error)])
        told.fits = False
        told.figures["warnings"] = list(dict.fromkeys([*told.figures.get("warnings", []), str(error)]))
        told.record("")
        return
    if checkpoint is None:
        return
    told.pair = dataclasses.replace(told.pair, checkpoint=checkpoint)
    found = judge(told.pair)
    told.fits &= not any(finding.refuse for finding in found)
    told.figures |= {"headers_checked": True, "warnings": [finding.text for finding in found]}
    told.record("the draft fits the target and was loaded whole")
