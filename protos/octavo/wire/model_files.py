"""How files of a model's folder are opened: what is no regular file is refused at once, where reading it could wait forever."""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegularError(OSError):
    """A file of a model is a pipe, a device or a folder; the text leaves its name to who tells it."""

    def __str__(self) -> str:
        return self.strerror or ""


def open_model_file(path: Path) -> BinaryIO:
    """Open a file of a model's folder for reading; it never waits for a writer.

    Raises:
        NotRegularError: it is no regular file, nor a link to one.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegularError(errno.EINVAL, "it is no regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_model_text(path: Path) -> str:
    """Return the UTF-8 text of a file of a model's folder.

    Raises:
        OSError: as of `open_model_file`, or it cannot be read.
        UnicodeDecodeError: it is no such text.
    """
    with io.TextIOWrapper(open_model_file(path), encoding="utf-8") as file:
        return file.read()
