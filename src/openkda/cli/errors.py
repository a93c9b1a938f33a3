"""How a command tells the user that it cannot do what was asked."""

USER_ERROR = 2  # exit code: the request is wrong; what argparse uses too
INTERRUPTED = 130  # exit code: Ctrl-C, as shells report it (128 + SIGINT)
READER_LEFT = 141  # exit code: what read the output has gone, as shells report it (128 + SIGPIPE)


class UserError(Exception):
    """Shown as one line, `openkda COMMAND: message`, without a traceback."""
