//! Windows: what was allocated between two moments and is alive at a third, and what has changed between two.
//!
//! A free names the trace and the size of the allocation that it ends, not the allocation. Of several live blocks of one
//! trace and size it may be any, and they may be of different age. So there are two answers: the most that can be left of
//! the window (every free that may be of another block is), and the least (every free that may be of the window is). Both
//! are exact for the records; the truth is between them. They agree wherever a trace's blocks of one size are all of the
//! window, or none is.

use std::time::Duration;

use foldhash::{HashMap, HashMapExt};

use super::{Reader, ReaderError};
use crate::profile::model::{Event, Live};
use crate::profile::sampling::{Weight, WeightCache};

/// The least and the most that is alive.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Bounds {
    /// At least this. `alloc_bytes` and `alloc_objects` are what was allocated in the window.
    pub least: Live,
    /// At most this.
    pub most: Live,
}

/// What was allocated in a window and is alive later.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Window {
    /// Each trace that allocated in it, by index.
    pub traces: Vec<(u32, Bounds)>,
    /// All of them together.
    pub total: Bounds,
}

/// How a trace has changed from one moment to another. Variances are those of the change: blocks that are alive at both
/// moments do not count. Where a free may have hit an old or a new block, the larger variance is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Change {
    /// Live bytes then.
    pub from: Live,
    /// Live bytes now.
    pub to: Live,
    /// Variance of the difference of bytes.
    pub bytes_variance: f64,
    /// Variance of the difference of objects.
    pub objects_variance: f64,
}

impl Change {
    /// Bytes that have been added; negative if there are fewer.
    pub fn bytes(&self) -> f64 {
        self.to.bytes - self.from.bytes
    }

    /// Objects that have been added.
    pub fn objects(&self) -> f64 {
        self.to.objects - self.from.objects
    }
}

/// What has changed from one moment to another.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Changes {
    /// Each trace with anything alive at one of the moments, or allocated between them, by index.
    pub traces: Vec<(u32, Change)>,
}

/// Records of one trace and size that are alive.
#[derive(Debug, Clone, Copy, Default)]
struct Class {
    all: u64,
    /// Of the window, at least and at most.
    least: u64,
    most: u64,
    /// Allocated in the window, freed or not.
    allocated: u64,
    /// Alive when the window began, and of these at least still alive.
    old: u64,
    old_left: u64,
}

type Key = (u32, u64, bool);

struct Classes(HashMap<Key, Class>);

impl Classes {
    fn apply(&mut self, event: &Event, is_inside: bool) {
        let class = self.0.entry((event.trace, event.size, event.continues)).or_default();
        if !event.is_free {
            class.all += 1;
            if is_inside {
                class.least += 1;
                class.most += 1;
                class.allocated += 1;
            }
            return;
        }
        class.all = class.all.saturating_sub(1);
        class.least = class.least.saturating_sub(1);
        class.most = class.most.min(class.all);
        class.old_left = class.old_left.saturating_sub(1);
        // What is over is forgotten, so that memory is in proportion to what is alive.
        if class.all == 0 && class.allocated == 0 && class.old == 0 {
            self.0.remove(&(event.trace, event.size, event.continues));
        }
    }
}

/// So many records of a size.
fn records(count: u64, size: u64, weight: Weight, continues: bool) -> Live {
    let times = count as f64;
    let bytes = size as f64;
    // A further piece of a block is no object of its own.
    let objects = if continues { 0.0 } else { times };
    Live {
        bytes: times * bytes * weight.objects,
        objects: objects * weight.objects,
        bytes_variance: times * bytes * bytes * weight.variance,
        objects_variance: objects * weight.variance,
        alloc_bytes: 0.0,
        alloc_objects: 0.0,
        sampled: if continues { 0 } else { count },
        sampled_bytes: count.saturating_mul(size),
    }
}

impl Reader {
    /// What was allocated after `from` (`None`: from the beginning), up to and including `to`, and is alive at `at` (`None`: at the end). One pass over
    /// the events to `at`; memory in proportion to what is alive, and to the different sizes of the window.
    ///
    /// # Errors
    /// When the events cannot be opened.
    pub fn window(&self, from: Option<Duration>, to: Duration, at: Option<Duration>) -> Result<Window, ReaderError> {
        let mut classes = Classes(HashMap::new());
        for event in self.profile.events()? {
            if at.is_some_and(|at| event.clock > at) {
                break;
            }
            let is_inside = from.is_none_or(|from| from < event.clock) && event.clock <= to;
            classes.apply(&event, is_inside);
        }
        let mut weights = WeightCache::new(self.profile.weights());
        let mut traces: HashMap<u32, Bounds> = HashMap::new();
        for ((index, size, continues), class) in classes.0 {
            if class.allocated == 0 {
                continue;
            }
            let weight = weights.of(size);
            let bounds = traces.entry(index).or_default();
            let allocated = records(class.allocated, size, weight, continues);
            for (sum, count) in [(&mut bounds.least, class.least), (&mut bounds.most, class.most)] {
                sum.add(&Live {
                    alloc_bytes: allocated.bytes,
                    alloc_objects: allocated.objects,
                    ..records(count, size, weight, continues)
                });
            }
        }
        let mut window = Window {
            traces: traces.into_iter().collect(),
            total: Bounds::default(),
        };
        window.traces.sort_unstable_by_key(|(index, _)| *index);
        for (_, bounds) in &window.traces {
            window.total.least.add(&bounds.least);
            window.total.most.add(&bounds.most);
        }
        Ok(window)
    }

    /// What has changed from one moment to another (`None`: the end). One pass, as for [`window`](Self::window).
    ///
    /// # Errors
    /// When the events cannot be opened.
    pub fn changes(&self, from: Duration, to: Option<Duration>) -> Result<Changes, ReaderError> {
        let mut classes = Classes(HashMap::new());
        let mut events = self.profile.events()?;
        let mut pending = None;
        use crate::profile::reader::Reader as Profile;
        Profile::apply_until(&mut events, &mut pending, Some(from), |event| {
            classes.apply(event, false)
        });
        for class in classes.0.values_mut() {
            class.old = class.all;
            class.old_left = class.all;
        }
        Profile::apply_until(&mut events, &mut pending, to, |event| classes.apply(event, true));
        let mut weights = WeightCache::new(self.profile.weights());
        let mut traces: HashMap<u32, Change> = HashMap::new();
        for ((index, size, continues), class) in classes.0 {
            let weight = weights.of(size);
            let of = |count| records(count, size, weight, continues);
            let change = traces.entry(index).or_default();
            change.from.add(&of(class.old));
            let allocated = of(class.allocated);
            change.to.add(&Live {
                alloc_bytes: allocated.bytes,
                alloc_objects: allocated.objects,
                ..of(class.all)
            });
            let moved = of(class.old - class.old_left + class.all.saturating_sub(class.old_left));
            change.bytes_variance += moved.bytes_variance;
            change.objects_variance += moved.objects_variance;
        }
        let mut traces: Vec<_> = traces.into_iter().collect();
        traces.sort_unstable_by_key(|(index, _)| *index);
        Ok(Changes { traces })
    }
}
