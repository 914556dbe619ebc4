"""What a job is and what shall happen to it: pure functions of values and `now`. No I/O, no SQL, no HTTP, no clock."""
