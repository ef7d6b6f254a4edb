//! A census as text.

use super::table::{Census, Change, Mode, Row};
use super::why::Why;
use crate::report::human::{bytes, clean, count, share};

/// Columns before the name.
const COUNT: usize = 14;
const BYTES: usize = 12;
const SHARE: usize = 7;

/// The census, its `rows` by type or by module, at most `limit` of them.
#[must_use]
pub fn census(census: &Census, rows: &[Row], what: &str, limit: usize) -> String {
    let total = &census.total;
    let mut text = format!(
        "census of {} (Python {}): {} objects, {}\n",
        subject(census),
        census.python,
        count(total.count as f64),
        bytes(total.bytes as f64)
    );
    text += &coverage(census);
    text += &memory(census);
    text += &format!(
        "\n{:>COUNT$} {:>BYTES$} {:>SHARE$}  {what}\n",
        "objects", "bytes", "share"
    );
    for row in rows.iter().take(limit) {
        text += &format!(
            "{:>COUNT$} {:>BYTES$} {:>SHARE$}  {}\n",
            count(row.count as f64),
            bytes(row.bytes as f64),
            share(row.bytes as f64, total.bytes as f64),
            clean(&row.name)
        );
    }
    text += &more(rows, limit, what);
    text += &small(census);
    text
}

/// Where the resident memory is.
fn memory(census: &Census) -> String {
    let Some(memory) = &census.memory else {
        return String::new();
    };
    let all = memory.rss_bytes as f64;
    let group = |group: &super::table::Group| {
        let part = group.bytes as f64;
        format!("{} {} ({})", group.name, bytes(part), share(part, all).trim_start())
    };
    let groups: Vec<String> = memory.groups.iter().map(group).collect();
    format!(
        "{} {}: {}; verdict: {}\n",
        bytes(all),
        match census.mode {
            Mode::Core => "written to",
            _ => "resident",
        },
        groups.join(", "),
        memory.verdict
    )
}

/// What is not among the rows: what only C code holds, by type, and small blocks that are no objects.
fn small(census: &Census) -> String {
    const NAMED: usize = 5;
    let Some(small) = census.small_blocks.as_ref().filter(|small| small.in_use.blocks > 0) else {
        return String::new();
    };
    let mut text = String::from("\n");
    if census.total.from_c > 0 {
        let mut rows: Vec<&Row> = census.types.iter().filter(|row| row.from_c > 0).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.from_c));
        let named = rows.iter().take(NAMED);
        let named: Vec<String> = named
            .map(|row| format!("{} {}", count(row.from_c as f64), clean(&row.name)))
            .collect();
        text += &format!(
            "held from C, or by nothing: {} of the objects, {} ({}{})\n",
            count(census.total.from_c as f64),
            bytes(census.total.from_c_bytes as f64),
            named.join(", "),
            if rows.len() > NAMED { ", ..." } else { "" }
        );
    }
    let of = |blocks: &super::small::Blocks| bytes(blocks.bytes as f64);
    text += &format!(
        "small blocks ({}): {} in use; objects and their tables {}, other memory of objects {}, kept for the next object {}, of C code {}",
        small.allocator,
        of(&small.in_use),
        of(&small.counted),
        of(&small.attached),
        of(&small.kept_for_reuse),
        of(&small.unknown)
    );
    let classes = small.unknown_by_size.iter().take(NAMED);
    let classes: Vec<String> = classes
        .map(|class| match class.size {
            0 => format!("{} above 1024", bytes(class.bytes as f64)),
            size => format!("{} of {size}", bytes(class.bytes as f64)),
        })
        .collect();
    if !classes.is_empty() {
        text += &format!(" (by size: {})", classes.join(", "));
    }
    if small.not_looked_at > 0 {
        text += &format!("; {} blocks were not looked at", count(small.not_looked_at as f64));
    }
    text + "\n"
}

/// What was not shown.
fn more(rows: &[Row], limit: usize, what: &str) -> String {
    let rest = rows.get(limit..).unwrap_or_default();
    if rest.is_empty() {
        return String::new();
    }
    let all = |field: fn(&Row) -> u64| rest.iter().map(field).fold(0, u64::saturating_add);
    format!(
        "{:>COUNT$} {:>BYTES$} {:>SHARE$}  in {} more {what}s (--limit {} shows them)\n",
        count(all(|row| row.count) as f64),
        bytes(all(|row| row.bytes) as f64),
        "",
        count(rest.len() as f64),
        rows.len()
    )
}

fn subject(census: &Census) -> String {
    match census.mode {
        Mode::Core => format!("the core file of process {}, {}", census.pid, clean(&census.command)),
        _ => format!("process {}, {}", census.pid, clean(&census.command)),
    }
}

/// What the numbers are worth.
fn coverage(census: &Census) -> String {
    let how = match census.mode {
        Mode::Live => "read while the process ran: approximate",
        Mode::Frozen => "read in a copy that stood still",
        Mode::Core => "read from the core file",
    };
    let doubts = census.inconsistent.all();
    let doubts = match doubts {
        0 => "nothing inconsistent met".to_owned(),
        1 => "1 inconsistency met and left out".to_owned(),
        _ => format!("{} inconsistencies met and left out", count(doubts as f64)),
    };
    let mut text = format!(
        "{how}, in {:.1} s; {doubts}. Sizes are those of sys.getsizeof.\n",
        census.elapsed_seconds
    );
    if let Some(cost) = &census.copy {
        text += &crate::rss::render::copy(cost);
    }
    for reason in &census.incomplete {
        text += &format!("INCOMPLETE: {reason}\n");
    }
    text
}

/// Who holds what was asked for. `omitted` ways are not in it.
#[must_use]
pub fn why(census: &Census, why: &Why, omitted: usize) -> String {
    let mut text = format!(
        "{} in {} (Python {}): {} objects, {}; without them {} would be free\n",
        clean(&why.of),
        subject(census),
        census.python,
        count(why.count as f64),
        bytes(why.bytes as f64),
        bytes(why.retained_bytes as f64)
    );
    text += &coverage(census);
    text += &match why.sampled as u64 {
        sampled if sampled < why.count => format!("\nheld by (of {sampled} of them)\n"),
        _ => "\nheld by\n".to_owned(),
    };
    for way in &why.ways {
        let steps: Vec<String> = way.steps.iter().map(|step| clean(step).into_owned()).collect();
        text += &format!("{:>COUNT$}  {}\n", count(way.count as f64), steps.join(" → "));
    }
    if omitted > 0 {
        text += &format!("{} more ways (--limit shows them)\n", count(omitted as f64));
    }
    let row = |retained: u64, name: &str, what: &str| {
        let (retained, name) = (bytes(retained as f64), clean(name));
        format!("{retained:>COUNT$}  {name} ({what})\n")
    };
    text += "\ntypes, and what would be free without all objects of each\n";
    for of in why.types.iter().take(10) {
        text += &row(
            of.retained_bytes,
            &of.name,
            &format!("{} objects", count(of.count as f64)),
        );
    }
    text += "\nvariables of modules, and what would be free without each\n";
    for holder in why.globals.iter().take(10) {
        text += &row(holder.retained_bytes, &holder.name, &clean(&holder.kind));
    }
    text
}

/// What has changed between two censuses.
#[must_use]
pub fn changes(before: &Census, after: &Census, changes: &[Change], what: &str, limit: usize) -> String {
    let seconds = (after.taken_unix_seconds - before.taken_unix_seconds).round();
    let mut text = format!(
        "{} to {}: {} objects, {} in {seconds:.0} s\n",
        subject(before),
        subject(after),
        signed(i128::from(after.total.count) - i128::from(before.total.count)),
        signed_bytes(i128::from(after.total.bytes) - i128::from(before.total.bytes))
    );
    for census in [before, after] {
        if census.mode == Mode::Live || !census.incomplete.is_empty() {
            text += &coverage(census);
        }
    }
    text += &format!(
        "\n{:>COUNT$} {:>BYTES$} {:>COUNT$} {:>BYTES$}  {what}\n",
        "objects", "bytes", "now", "now"
    );
    for change in changes.iter().take(limit) {
        text += &format!(
            "{:>COUNT$} {:>BYTES$} {:>COUNT$} {:>BYTES$}  {}\n",
            signed(change.count()),
            signed_bytes(change.bytes()),
            count(change.count_after as f64),
            bytes(change.bytes_after as f64),
            clean(&change.name)
        );
    }
    let rest = changes.len().saturating_sub(limit);
    if rest > 0 {
        text += &format!(
            "{} more {what}s have changed (--limit {} shows them)\n",
            count(rest as f64),
            changes.len()
        );
    }
    if changes.is_empty() {
        text += "nothing has changed\n";
    }
    text
}

fn signed(number: i128) -> String {
    let sign = if number < 0 { "-" } else { "+" };
    format!("{sign}{}", count(number.unsigned_abs() as f64))
}

fn signed_bytes(number: i128) -> String {
    let sign = if number < 0 { "-" } else { "+" };
    format!("{sign}{}", bytes(number.unsigned_abs() as f64))
}
