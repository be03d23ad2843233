"""What can go wrong through no fault of the program; each message names the value, the constraint and the fix."""


class TrainingError(Exception):
    """A mistake of the user or a condition of the run, told in one line."""


class ConfigError(TrainingError):
    """A config that describes no possible run."""


class CheckpointError(TrainingError):
    """A work directory or checkpoint that cannot be used."""


class Diverged(TrainingError):
    """The loss or the parameters are no longer finite."""
