//! pyheap's command line: parse, run, print the error chain, exit code.

use clap::{CommandFactory, Parser};
use pyheap::ui::cli::failure::{Failure, chain, code};
use pyheap::ui::cli::{
    attach, census, cure, demo, diff, digest, doctor, dump, events, export, flame, flow, html, info, leaks, manual,
    plot, ps, push, record, rss, serve, top, whence,
};
use pyheap::ui::output::note;
use std::process::ExitCode;

/// A heap profiler for running CPython processes. It attaches from outside, needs nothing in the process, and leaves no
/// trace.
///
/// Start with `pyheap demo`, then `pyheap record PID --duration 1m` and `pyheap leaks run`.
#[derive(Debug, Parser)]
#[command(name = "pyheap", version = pyheap::version_and_protocol(), max_term_width = 100)]
enum Command {
    Ps(ps::Args),
    Doctor(doctor::Args),
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
    Census(census::Args),
    Rss(rss::Args),
    Cure(cure::Args),
    Demo(demo::Args),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Ps(args) => ps::run(&args),
        Command::Doctor(args) => doctor::run(&args),
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
        Command::Census(args) => census::run(&args),
        Command::Rss(args) => rss::run(&args),
        Command::Cure(args) => cure::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Completions(args) => manual::completions(&args, Command::command()),
        Command::Man(args) => manual::man(&args, Command::command()),
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
