"""Programs that a benchmark runs beside itself."""

import subprocess

END_TIMEOUT_S = 40.0
"""For a program to end its processes and remove its folders."""


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a program in order, if it has not ended; kill it where that takes too long."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
