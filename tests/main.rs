//! The integration tests: one file for each promise to the user, all in one program, so that what they share is compiled once.
//! `cargo test --release --test integration states::` runs those of one file; `scripts/test states` does it as CI does, each
//! file in a process of its own.
//!
//! `export_damage.rs` is a program of its own: it counts what is allocated in the whole process.

mod common;

mod accuracy;
mod attacks;
mod bad_luck;
mod census;
mod deploy;
mod dump;
mod export;
mod find;
mod fleet;
mod forks;
mod frames_dwarf;
mod frames_interpreter;
mod frames_lines;
mod frames_preflight;
mod frames_stacks;
mod freeze;
mod hostile;
mod html;
mod leaks;
mod live;
mod model;
mod native;
mod native_leaks;
mod native_stacks;
mod prefork;
mod profile_commands;
mod profile_damage;
mod profile_golden;
mod profile_writer;
mod reader_commands;
mod reader_exact;
mod reader_golden;
mod record_cli;
mod refusals;
mod rss;
mod serve;
mod soak;
mod states;
mod types;
mod unharmed;
mod versions;
mod whereis;
