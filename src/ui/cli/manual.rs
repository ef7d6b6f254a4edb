//! `pyheap completions` and `pyheap man`: made from the same definition as `--help`.

use super::failure::Failure;
use crate::ui::output::{note, to_stdout};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use std::error::Error;
use std::path::PathBuf;

/// Print completions for a shell.
///
/// bash: `pyheap completions bash > ~/.local/share/bash-completion/completions/pyheap`; zsh: into a file `_pyheap` in a folder of
/// `$fpath`; fish: `~/.config/fish/completions/pyheap.fish`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Print the manual page, or that of a subcommand, or write all of them into a folder.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// A subcommand.
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    pub command: Option<String>,

    /// Write pyheap.1, pyheap-record.1 … into this folder.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Runs `pyheap completions`.
///
/// # Errors
/// When standard output cannot be written.
pub fn completions(args: &CompletionsArgs, mut command: Command) -> Result<(), Box<dyn Error>> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "pyheap", &mut text);
    Ok(to_stdout(&String::from_utf8(text)?)?)
}

/// Runs `pyheap man`.
///
/// # Errors
/// When there is no such subcommand, or the pages cannot be written.
pub fn man(args: &ManArgs, mut command: Command) -> Result<(), Box<dyn Error>> {
    command.build();
    if let Some(dir) = &args.dir {
        let mut count = 0;
        for page in pages(&command) {
            let path = dir.join(format!("{}.1", page.0));
            std::fs::write(&path, page.1)
                .map_err(|error| Failure::failed(format!("cannot write {}: {error}", path.display())))?;
            count += 1;
        }
        note(&format!("{count} pages are in {}", dir.display()));
        return Ok(());
    }
    let wanted = args
        .command
        .as_ref()
        .map_or_else(|| "pyheap".to_owned(), |name| format!("pyheap-{name}"));
    let found = pages(&command).into_iter().find(|page| page.0 == wanted);
    let Some((_, page)) = found else {
        return Err(Failure::new(super::failure::code::USAGE, format!("there is no page {wanted}")).into());
    };
    Ok(to_stdout(&String::from_utf8(page)?)?)
}

/// All pages by their names.
fn pages(command: &Command) -> Vec<(String, Vec<u8>)> {
    let shown = command
        .get_subcommands()
        .filter(|one| !one.is_hide_set() && one.get_name() != "help");
    let all = std::iter::once(("pyheap".to_owned(), command.clone())).chain(shown.map(|one| {
        let name = format!("pyheap-{}", one.get_name());
        (
            name.clone(),
            one.clone().name(name).bin_name(format!("pyheap {}", one.get_name())),
        )
    }));
    all.filter_map(|(name, command)| {
        let mut page = Vec::new();
        Man::new(command).render(&mut page).ok()?;
        Some((name, page))
    })
    .collect()
}
