"""What this package raises."""


class UnsupportedVersionError(RuntimeError):
    """This Triton or this NineToothed is not one whose launch path is known."""


class SourceFolderError(RuntimeError):
    """The folder that NineToothed keeps its generated sources in cannot be used."""
