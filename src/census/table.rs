//! What a census is when it is done: a row a type, kept in a file, compared with another.

use super::Found;
use super::heap::Doubts;
use super::small::Small;
use crate::attach::frozen::Cost;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The number of the file's form. Another one is another form.
const FORM: u32 = 1;
/// A file of a million types has some 200 MB.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// How the memory was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// While the process ran: the numbers are close, not exact.
    Live,
    /// In a copy of the process that stood still.
    Frozen,
    /// Out of a core file.
    Core,
}

/// One type, or one module.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Module and qualified name, the module left out if it is `builtins`; or the module.
    pub name: String,
    /// The module.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub module: String,
    /// Objects.
    pub count: u64,
    /// Of them, those that the garbage collector knows.
    pub tracked: u64,
    /// Bytes as `sys.getsizeof` counts them.
    pub bytes: u64,
    /// Of the objects, those that only C code holds, or nothing.
    #[serde(default)]
    pub from_c: u64,
    /// Bytes of these.
    #[serde(default)]
    pub from_c_bytes: u64,
}

/// Where the resident memory is, in short: the whole table is `pyheap rss`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Memory {
    /// Resident bytes; of a core file, those in the file.
    pub rss_bytes: u64,
    /// The group with the most of them.
    pub verdict: String,
    /// All groups.
    pub groups: Vec<Group>,
}

/// One group of the resident memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Group {
    /// What it is.
    pub name: String,
    /// Resident bytes.
    pub bytes: u64,
}

impl From<&crate::rss::Report> for Memory {
    fn from(report: &crate::rss::Report) -> Self {
        let group = |group: crate::rss::Group| Group {
            name: group.name().to_owned(),
            bytes: report
                .rows
                .iter()
                .filter(|row| row.group == group)
                .map(|row| row.bytes)
                .sum(),
        };
        Self {
            rss_bytes: report.rss_bytes,
            verdict: report.verdict.word.name().to_owned(),
            groups: crate::rss::Group::ALL.map(group).into(),
        }
    }
}

/// A census.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Census {
    /// The form of this object.
    pub pyheap_census: u32,
    /// The process.
    pub pid: i32,
    /// Its command line.
    pub command: String,
    /// The version of its Python.
    pub python: String,
    /// How it was read.
    pub mode: Mode,
    /// When, in seconds since 1970.
    pub taken_unix_seconds: f64,
    /// How long it took.
    pub elapsed_seconds: f64,
    /// What a frozen copy has cost the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<Cost>,
    /// Where the resident memory is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// Interpreters of the process, all of which are covered.
    pub interpreters: usize,
    /// The numbers are those of one moment.
    pub exact: bool,
    /// Why objects may be missing.
    pub incomplete: Vec<String>,
    /// What did not fit, and was left out.
    pub inconsistent: Doubts,
    /// The small blocks in use, and what they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub small_blocks: Option<Small>,
    /// All objects.
    pub total: Row,
    /// The types, the largest first.
    pub types: Vec<Row>,
}

/// What a census is about.
#[derive(Debug, Clone)]
pub struct About {
    /// The process.
    pub pid: i32,
    /// Its command line.
    pub command: String,
    /// The version of its Python.
    pub python: String,
    /// How it was read.
    pub mode: Mode,
    /// When, in seconds since 1970.
    pub taken_unix_seconds: f64,
}

/// Why a saved census cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// It cannot be read.
    #[error("{} cannot be read", .path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is none.
    #[error("{} is no census: `pyheap census PID --save FILE` makes one", .path.display())]
    NoCensus {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// It is one of another version.
    #[error("{} is a census of form {form}, and this pyheap reads form {FORM}", .path.display())]
    OtherForm {
        /// Which file.
        path: PathBuf,
        /// Its form.
        form: u32,
    },
}

/// The rows in order: the largest first, names decide between equals.
fn sorted(rows: BTreeMap<String, Row>) -> Vec<Row> {
    let mut rows: Vec<Row> = rows.into_values().collect();
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    rows
}

fn add(to: &mut Row, row: &Row) {
    to.count = to.count.saturating_add(row.count);
    to.tracked = to.tracked.saturating_add(row.tracked);
    to.bytes = to.bytes.saturating_add(row.bytes);
    to.from_c = to.from_c.saturating_add(row.from_c);
    to.from_c_bytes = to.from_c_bytes.saturating_add(row.from_c_bytes);
}

impl Census {
    /// The census that a walk gives.
    #[must_use]
    pub fn of(about: About, found: &Found) -> Self {
        let mut rows: BTreeMap<String, Row> = BTreeMap::new();
        let mut total = Row {
            name: "all".to_owned(),
            ..Row::default()
        };
        for info in found.types.iter().filter(|info| info.count > 0) {
            let row = Row {
                name: info.name.to_string(),
                module: info.module.to_string(),
                count: info.count,
                tracked: info.tracked,
                bytes: info.bytes,
                from_c: info.from_c,
                from_c_bytes: info.from_c_bytes,
            };
            add(&mut total, &row);
            let name = format!("{}\0{}", row.module, row.name);
            // Types that were made again have the same name.
            match rows.get_mut(&name) {
                Some(old) => add(old, &row),
                None => _ = rows.insert(name, row),
            }
        }
        let mut incomplete = Vec::new();
        if found.collecting {
            incomplete.push("the garbage collector was at work, and has objects apart: try again".to_owned());
        }
        if found.left > 0 {
            incomplete.push(format!(
                "time was over: {} objects that were met were not looked at",
                found.left
            ));
        }
        Self {
            pyheap_census: FORM,
            pid: about.pid,
            command: about.command,
            python: about.python,
            mode: about.mode,
            taken_unix_seconds: about.taken_unix_seconds,
            elapsed_seconds: found.elapsed.as_secs_f64(),
            copy: None,
            memory: None,
            interpreters: found.interpreters,
            exact: about.mode != Mode::Live && incomplete.is_empty(),
            incomplete,
            inconsistent: found.doubts,
            small_blocks: found.small.clone(),
            total,
            types: sorted(rows),
        }
    }

    /// The rows by module.
    #[must_use]
    pub fn by_module(&self) -> Vec<Row> {
        let mut rows: BTreeMap<String, Row> = BTreeMap::new();
        for row in &self.types {
            let module = rows.entry(row.module.clone()).or_insert_with(|| Row {
                name: row.module.clone(),
                ..Row::default()
            });
            add(module, row);
        }
        sorted(rows)
    }

    /// Reads a census that was saved.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        #[derive(Deserialize)]
        struct Form {
            pyheap_census: u32,
        }
        let failed = |source| LoadError::Io {
            path: path.to_owned(),
            source,
        };
        let broken = |source| LoadError::NoCensus {
            path: path.to_owned(),
            source,
        };
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(failed)?;
        file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        let form: Form = serde_json::from_slice(&bytes).map_err(broken)?;
        if form.pyheap_census != FORM {
            return Err(LoadError::OtherForm {
                path: path.to_owned(),
                form: form.pyheap_census,
            });
        }
        serde_json::from_slice(&bytes).map_err(broken)
    }
}

/// How one type has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Its name.
    pub name: String,
    /// Objects then.
    pub count_before: u64,
    /// Objects now.
    pub count_after: u64,
    /// Bytes then.
    pub bytes_before: u64,
    /// Bytes now.
    pub bytes_after: u64,
}

impl Change {
    /// Bytes more than before.
    #[must_use]
    pub fn bytes(&self) -> i128 {
        i128::from(self.bytes_after) - i128::from(self.bytes_before)
    }

    /// Objects more than before.
    #[must_use]
    pub fn count(&self) -> i128 {
        i128::from(self.count_after) - i128::from(self.count_before)
    }
}

/// What has changed from one list of rows to another, the most bytes first; what has not is left out.
#[must_use]
pub fn changes(before: &[Row], after: &[Row]) -> Vec<Change> {
    let mut all: BTreeMap<(&str, &str), Change> = BTreeMap::new();
    let change = |row: &Row| Change {
        name: row.name.clone(),
        count_before: 0,
        count_after: 0,
        bytes_before: 0,
        bytes_after: 0,
    };
    for row in before {
        let to = all.entry((&row.module, &row.name)).or_insert_with(|| change(row));
        (to.count_before, to.bytes_before) = (row.count, row.bytes);
    }
    for row in after {
        let to = all.entry((&row.module, &row.name)).or_insert_with(|| change(row));
        (to.count_after, to.bytes_after) = (row.count, row.bytes);
    }
    let mut all: Vec<Change> = all.into_values().collect();
    all.retain(|change| change.bytes() != 0 || change.count() != 0);
    all.sort_by(|a, b| {
        let most = b.bytes().cmp(&a.bytes());
        most.then_with(|| b.count().cmp(&a.count()))
            .then_with(|| a.name.cmp(&b.name))
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, count: u64, bytes: u64) -> Row {
        Row {
            name: name.to_owned(),
            module: "builtins".to_owned(),
            count,
            tracked: 0,
            bytes,
            ..Row::default()
        }
    }

    #[test]
    fn changes_are_sorted_by_growth() {
        let before = [
            row("a", 5, 500),
            row("gone", 1, 10),
            row("same", 2, 2),
            row("less", 9, 90),
        ];
        let after = [
            row("a", 6, 700),
            row("new", 3, 1000),
            row("same", 2, 2),
            row("less", 1, 10),
        ];
        let found = changes(&before, &after);
        let names: Vec<&str> = found.iter().map(|change| change.name.as_str()).collect();
        assert_eq!(names, ["new", "a", "gone", "less"]);
        let bytes: Vec<i128> = found.iter().map(Change::bytes).collect();
        assert_eq!(bytes, [1000, 200, -10, -80]);
    }

    #[test]
    fn other_files_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("census");
        assert!(matches!(Census::load(&path), Err(LoadError::Io { .. })));
        std::fs::write(&path, b"{\"a\": 1}").unwrap();
        assert!(matches!(Census::load(&path), Err(LoadError::NoCensus { .. })));
        std::fs::write(&path, b"{\"pyheap_census\": 9}").unwrap();
        assert!(matches!(Census::load(&path), Err(LoadError::OtherForm { form: 9, .. })));
    }
}
