"""What stands for a token that cannot be drawn. Processes without torch read it, too."""

NOT_FINITE = -1  # the token of a row with a NaN or +inf; -inf only marks a token that must not be drawn
