"""Variables of a base in plain OCI images: what a shell makes of Apptainer's script."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dni_runtime.image.tarform import _environment

SCRIPT = r"""#!/bin/sh
export PATH="/usr/local/cuda/bin:/usr/bin"
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-"/usr/local/cuda/lib64:/usr/lib"}"
export EMPTY="${EMPTY:-""}"
export UNKNOWN="${UNKNOWN:-}"
export PYTHONHOME="${PYTHONHOME:-"/usr"}"
export ODD="${ODD:-"a \"b\" \$HOME \\ \`c\` = d"}"
export LINES="${LINES:-"first
export NONE=\"1\"
\\n last"}"
"""


def test_variables_of_the_base_are_kept_as_a_shell_reads_them(tmp_path: Path) -> None:
    script = tmp_path / "10-docker2singularity.sh"
    script.write_text(SCRIPT)
    argv = ["/bin/sh", "-c", f". {script}; exec /usr/bin/env -0"]
    done = subprocess.run(argv, env={}, capture_output=True, text=True, check=True)
    real = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    found = _environment(script.read_bytes())
    for name in ("LD_LIBRARY_PATH", "EMPTY", "ODD", "LINES"):
        assert found[name] == real[name]
    assert found["PATH"].startswith(
        "/opt/dni/venv/bin:/usr/local/cuda/bin:/usr/bin:/usr/local/sbin"
    )
    assert found["PYTHONPATH"] == "/opt/dni/runtime:/opt/dni/src"
    assert not {"UNKNOWN", "PYTHONHOME", "NONE"} & found.keys()


def test_line_ends_as_apptainer_1_4_writes_them() -> None:
    found = _environment(rb"""export LINES="${LINES:-"a\n\tb \\n"}" """.rstrip())
    assert found["LINES"] == "a\n\tb \\n"
