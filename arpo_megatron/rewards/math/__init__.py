"""Whether two mathematical answers are equal: by text and number if possible, else by math-verify in a worker."""
