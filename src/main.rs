//! pyheap's command line.

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;
use pyheap::ui::cli::{digest, flame, info_run, top};

/// A heap profiler for running CPython processes.
#[derive(Debug, Parser)]
#[command(version)]
enum Command {
    Info(info_run::Args),
    Digest(digest::Args),
    Top(top::Args),
    Flame(flame::Args),
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Info(args) => info_run::run(&args),
        Command::Digest(args) => digest::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Flame(args) => flame::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut text = format!("error: {error}");
            let mut cause: Option<&dyn Error> = error.source();
            while let Some(error) = cause {
                text += &format!(": {error}");
                cause = error.source();
            }
            pyheap::ui::output::note(&text);
            ExitCode::FAILURE
        }
    }
}
