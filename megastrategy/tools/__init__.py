"""Serves people beside a training: the ``megastrategy`` command. Tools read core; core never imports them."""
