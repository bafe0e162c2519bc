"""Lines of TorchTitan's log that are not true of a run of this model, and are replaced by lines that are."""

import logging

_UNTRUE = (
    # A device it does not know gets an A100's peak rate; the metrics processor says which peak is used, or none.
    "Peak FLOPS used for computing MFU",
    "Peak flops undefined for",
    "Error running lspci",
    # It leaves mixed precision out under tensor parallelism without FSDP; `parallelize` does not, and says so.
    "Mixed precision training with TP or PP is only supported",
    "Mixed precision training is disabled",
    "Mixed precision training is handled by",
    # The metrics processor brings the last stage's loss to every rank.
    "Pipeline Parallel loss is not visible",
)


class _Untrue(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        return not any(line in text for line in _UNTRUE)


def hide_untrue_lines() -> None:
    """Filter TorchTitan's logger, which is the root logger; a second call changes nothing."""
    root = logging.getLogger()
    if not any(isinstance(f, _Untrue) for f in root.filters):
        root.addFilter(_Untrue())
