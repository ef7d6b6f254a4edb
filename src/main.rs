//! pyheap's command line: parse, run, print the error chain, exit code.

use clap::Parser;
use pyheap::ui::cli::failure::{Failure, chain, code};
use pyheap::ui::cli::{
    attach, cure, demo, diff, digest, dump, events, export, flame, flow, html, info, leaks, plot, push, record, serve,
    top, whence,
};
use pyheap::ui::output::note;
use std::process::ExitCode;

/// A heap profiler for running CPython processes. It attaches from outside, needs nothing in the process, and leaves no
/// trace.
///
/// Start with `pyheap demo`, then `pyheap record PID --duration 1m` and `pyheap leaks run`.
#[derive(Debug, Parser)]
#[command(name = "pyheap", version = pyheap::VERSION, max_term_width = 100)]
enum Command {
    Record(record::Args),
    Attach(attach::Args),
    Serve(serve::Args),
    Push(push::Args),
    Info(info::Args),
    Leaks(leaks::Args),
    Top(top::Args),
    Diff(diff::Args),
    Plot(plot::Args),
    Flow(flow::Args),
    Compare(flow::CompareArgs),
    Flame(flame::Args),
    Html(html::Args),
    Export(export::Args),
    Events(events::Args),
    Digest(digest::Args),
    Where(whence::Args),
    Dump(dump::Args),
    Cure(cure::Args),
    Demo(demo::Args),
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Record(args) => record::run(&args),
        Command::Attach(args) => attach::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Push(args) => push::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Leaks(args) => leaks::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Plot(args) => plot::run(&args),
        Command::Flow(args) => flow::run(&args),
        Command::Compare(args) => flow::run_compare(&args),
        Command::Flame(args) => flame::run(&args),
        Command::Html(args) => html::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Events(args) => events::run(&args),
        Command::Digest(args) => digest::run(&args),
        Command::Where(args) => whence::run(&args),
        Command::Dump(args) => dump::run(&args),
        Command::Cure(args) => cure::run(&args),
        Command::Demo(args) => demo::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(&format!("error: {}", chain(error.as_ref())));
            let code = error
                .downcast_ref::<Failure>()
                .map_or(code::FAILED, |failure| failure.code);
            ExitCode::from(code)
        }
    }
}
