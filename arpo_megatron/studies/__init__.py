"""Studies: several arms of one experiment over several seeds, from equal cold starts, to a table and a picture."""
