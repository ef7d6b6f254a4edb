//! pyheap's command line.
fn main() {}
