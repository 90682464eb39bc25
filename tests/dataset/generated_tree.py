"""A generated tree of image files, without files on disk."""

from __future__ import annotations

from pyarrow.fs import FileInfo, FileSelector, FileType, FSSpecHandler

IMAGES_PER_CLASS = 1_000
NAME_BYTES = len("c00000012/c00000012_00000123.JPEG")


class GeneratedTree(FSSpecHandler):  # type: ignore[misc]
    """File system that generates its files when they are listed."""

    def __init__(self, num_images: int) -> None:
        self.num_classes = num_images // IMAGES_PER_CLASS

    def get_type_name(self) -> str:
        return "generated"

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        return [FileInfo(path, FileType.Directory) for path in paths]

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        if not selector.recursive:
            names = (f"{selector.base_dir}/c{label:08}" for label in range(self.num_classes))
            return [FileInfo(name, FileType.Directory) for name in names]
        stem = f"{selector.base_dir}/{selector.base_dir[-9:]}"
        files = (f"{stem}_{i:08}.JPEG" for i in range(IMAGES_PER_CLASS))
        return [FileInfo(file, FileType.File, size=100_000) for file in files]
