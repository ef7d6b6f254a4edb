//! What the survivors of some stacks are, and how old: what the recording knows of its live samples.

use super::lock;
use super::watch::Watch;
use crate::collect::live::{Kind, Live};
use crate::collect::resolve;
use crate::profile::sampling::Weights;
use crate::report::leaks::{Report, ages};
use crate::report::types::{TypeRow, by_name, rows};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The live samples of some stacks.
#[derive(Debug, Clone, Default)]
pub struct Survivors {
    /// Their types, that with the most bytes first.
    pub types: Vec<TypeRow>,
    /// When they were allocated, in milliseconds since the start, with the bytes that each stands for.
    pub births: Vec<(u64, f64)>,
}

/// The survivors of each of these groups of stacks; their births only if they are wanted. `None` while the recording has another
/// period than the view knows yet: traces then have other numbers.
pub fn survivors(
    watch: &Mutex<Watch>,
    live: &Mutex<Live>,
    groups: &[&[u32]],
    with_births: bool,
) -> Option<Vec<Survivors>> {
    // Never both locks at once.
    let (of_trace, period) = {
        let watch = lock(watch);
        (groups_of_traces(&watch, groups), watch.period())
    };
    let weights = Weights::Period(period);
    let mut found = vec![Survivors::default(); groups.len()];
    let mut counts: Vec<HashMap<(Kind, u64), u64>> = vec![HashMap::new(); groups.len()];
    let names: HashMap<Kind, Arc<str>> = {
        let live = resolve::lock(live);
        if live.period() != period {
            return None;
        }
        for sample in live.samples() {
            for &group in of_trace.get(&sample.trace).into_iter().flatten() {
                *counts[group].entry((sample.kind, sample.size)).or_default() += 1;
                if with_births {
                    found[group].births.push((sample.born, sample.size as f64));
                }
            }
        }
        let kinds = counts.iter().flat_map(|counts| counts.keys());
        kinds.map(|(kind, _)| (*kind, live.kind_name(*kind))).collect()
    };
    for (found, counts) in found.iter_mut().zip(&counts) {
        let counts = counts
            .iter()
            .map(|((kind, size), count)| (&*names[kind], *size, *count));
        found.types = rows(by_name(counts, &weights));
        for (_, bytes) in &mut found.births {
            *bytes *= weights.of(*bytes as u64).objects;
        }
    }
    Some(found)
}

/// The groups that each trace is in.
fn groups_of_traces(watch: &Watch, groups: &[&[u32]]) -> HashMap<u32, Vec<usize>> {
    let mut of_stack: HashMap<u32, Vec<usize>> = HashMap::new();
    for (group, stacks) in groups.iter().enumerate() {
        for stack in *stacks {
            of_stack.entry(*stack).or_default().push(group);
        }
    }
    let groups = |(trace, stack)| Some((trace, of_stack.get(&stack)?.clone()));
    watch.traces().filter_map(groups).collect()
}

/// Enters types and ages into a verdict `at` this time since the start of the recording.
pub fn complete(report: &mut Report, watch: &Mutex<Watch>, live: &Mutex<Live>, at: Duration) {
    let groups: Vec<&[u32]> = report.leaks.iter().map(|site| &*site.traces).collect();
    if groups.is_empty() {
        return;
    }
    let Some(found) = survivors(watch, live, &groups, true) else {
        return;
    };
    for (site, found) in report.leaks.iter_mut().zip(found) {
        site.types = found.types;
        site.age_seconds = ages(found.births, at.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::live::{Estimate, Sample, Trace};
    use crate::collect::resolve::Event;
    use crate::collect::tree::NamedFrame;
    use crate::report::leaks::OwnCode;

    fn frame(line: u32) -> NamedFrame {
        NamedFrame {
            file: "app.py".into(),
            line,
            function: "f".into(),
        }
    }

    /// Two traces: 1 keeps two dicts and a str, 2 a str; each is a stack of its own.
    fn both() -> (Mutex<Watch>, Mutex<Live>) {
        let (mut watch, mut live) = (Watch::new(1, OwnCode::default(), None), Live::new(1));
        let dict = live.add_kind(&"dict".into());
        let text = live.add_kind(&"str".into());
        for (id, trace, kind, size) in [(1, 1, dict, 200), (2, 1, dict, 300), (3, 1, text, 50), (4, 2, text, 60)] {
            if live.traces.len() < trace as usize {
                live.traces.push(Trace {
                    site: frame(trace),
                    domain: 2,
                    thread: 0,
                    depth: 1,
                    live: Estimate::default(),
                });
                watch.events(&[Event::Trace(vec![frame(trace)])]);
            }
            let born = id * 1000;
            watch.events(&[Event::Alloc {
                at: Duration::from_secs(id),
                trace,
                size,
                born,
                domain: 2,
                thread: 0,
            }]);
            live.add(
                id,
                Sample {
                    trace,
                    size,
                    period: 1,
                    born,
                    address: id,
                    kind,
                },
            );
        }
        (Mutex::new(watch), Mutex::new(live))
    }

    #[test]
    fn types_and_births_of_groups_of_stacks() {
        let (watch, live) = both();
        let found = survivors(&watch, &live, &[&[1], &[2, 1], &[77]], true).unwrap();
        let types = |place: usize| -> Vec<(&str, f64, f64)> {
            let rows = found[place].types.iter();
            rows.map(|row| (row.name.as_str(), row.objects, row.bytes)).collect()
        };
        assert_eq!(types(0), [("dict", 2.0, 500.0), ("str", 1.0, 50.0)]);
        assert_eq!(types(1), [("dict", 2.0, 500.0), ("str", 2.0, 110.0)]);
        assert_eq!(types(2), []);
        let mut births = found[0].births.clone();
        births.sort_by_key(|(born, _)| *born);
        assert_eq!(births, [(1000, 200.0), (2000, 300.0), (3000, 50.0)]);
    }

    #[test]
    fn nothing_is_said_while_traces_are_renumbered() {
        let (watch, live) = both();
        live.lock().unwrap().raise(2);
        assert!(survivors(&watch, &live, &[&[1]], false).is_none());
    }
}
