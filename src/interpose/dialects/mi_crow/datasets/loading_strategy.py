"""`LoadingStrategy`: where the items of a data set are."""

from enum import StrEnum


class LoadingStrategy(StrEnum):
    """In memory, on the disk (as the `datasets` library maps them), or coming one by one."""

    MEMORY = "memory"
    DISK = "disk"
    STREAMING = "streaming"
