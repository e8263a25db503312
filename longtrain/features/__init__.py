"""What a frozen target computed for a document, kept on disk, so that later epochs need no forward of it."""
