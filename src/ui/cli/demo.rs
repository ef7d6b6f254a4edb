//! placeholder
use std::error::Error;
/// Demo.
#[derive(Debug, clap::Args)]
pub struct Args {}
/// Runs.
pub fn run(_: &Args) -> Result<(), Box<dyn Error>> { Ok(()) }
