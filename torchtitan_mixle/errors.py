"""The one exception a user's mistake raises."""


class ConfigError(ValueError):
    """A request that cannot work: its message names the values, the rule and a remedy.

    Raised with the same text on every rank, before any of them waits for another.
    """
