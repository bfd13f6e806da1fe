"""Layout of the table of a draft's levels (:class:`pd.kernels.drafting.DraftTables`)."""

# Columns of a level before its guesses, and fields of a guess.
LEVEL_HEAD, CHILD_FIELDS = 3, 5
