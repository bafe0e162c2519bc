"""The mixle CausalLM as a TorchTitan train spec.

Importing this package registers the model as `model.name = "mixle"` and, on a machine without an accelerator, lets
TorchTitan run on the CPU. The command line tool does without both until a command needs them: importing torchtitan
takes seconds.
"""

import sys
from pathlib import Path


def _set_up() -> None:
    from torchtitan_mixle import device, errors, spec, startup

    if not device.has_accelerator():
        device.install_cpu_device()
    errors.show_config_errors_as_one_line(startup.explain)
    spec.register()


_is_command_line_tool = Path(sys.argv[0] if sys.argv else "").name == "torchtitan-mixle" or sys.orig_argv[1:3] in (
    ["-m", __name__],
    ["-m", f"{__name__}.launch"],
)
if not _is_command_line_tool:
    _set_up()
