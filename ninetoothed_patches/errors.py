"""What this package raises."""


class UnsupportedVersionError(RuntimeError):
    """This Triton or this NineToothed is not one whose launch path is known."""
