"""Of Determined's package only the writer that trials used."""
