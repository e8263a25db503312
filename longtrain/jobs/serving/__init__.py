"""What `longtrain serve` is made of: requests as they may be written, the one worker, and the HTTP routes."""
