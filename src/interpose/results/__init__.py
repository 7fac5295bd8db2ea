"""Results: numbers over named axes, with how they were made; they print, show, save and load themselves."""
