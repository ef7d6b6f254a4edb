//! Who holds the objects of a type, and what would be free without them.
//!
//! After a census the heap is read once more, now with all references, into a [`graph`](super::graph). From the modules, then from the
//! variables of running calls, then from the states of threads, shortest ways are found to all objects; what none of
//! them reaches is held from C, or by nobody but itself. Ways to some objects of the type are put into words, and those that read the same are one
//! group. Dominators tell what each holder retains.
//!
//! Weak references hold nothing, and are no part of a way.

use super::graph::{Graph, NONE, Reached};
use super::heap::{DOUBTFUL, Heap};
use super::kinds::{Kind, TypeInfo, flag};
use super::marks::Numbers;
use super::stacks::Held;
use pyheap_injector::{RemoteAddr, RemoteMemory};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Objects whose ways are put into words.
const SAMPLES: usize = 1000;
/// Steps of a way that are put into words; a longer one is cut in the middle.
const MAX_STEPS: usize = 12;
/// Steps of a way that are followed at all.
const MAX_WAY: usize = 1 << 20;
/// Entries of a dict in which a value's name is looked for.
const MAX_ENTRIES: u64 = 1 << 20;
/// Holders of which it is told what they retain.
const MAX_HOLDERS: usize = 20;
/// Types of which that is told.
const MAX_TYPES: usize = 10;
/// Objects that are gone through to find them, a search through all references for each that may be one.
const SEARCHED: usize = 1 << 27;

/// What is asked for.
#[derive(Debug, Clone)]
pub enum Wanted {
    /// All objects of a type, by its name as a census shows it.
    Type(String),
    /// The object at an address.
    Address(u64),
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Why {
    /// What was asked for.
    pub of: String,
    /// Objects.
    pub count: u64,
    /// Their bytes, as `sys.getsizeof` counts them.
    pub bytes: u64,
    /// What would be free without them: they, and all that only they hold.
    pub retained_bytes: u64,
    /// Of so many it was found out who holds them.
    pub sampled: usize,
    /// Those that are held alike, the most first.
    pub ways: Vec<Way>,
    /// The types whose objects retain the most.
    pub types: Vec<Retaining>,
    /// The variables of modules that retain the most, of all.
    pub globals: Vec<Holder>,
}

/// Objects that are held in the same way.
#[derive(Debug, Clone, Serialize)]
pub struct Way {
    /// Of those that were looked at.
    pub sampled: usize,
    /// About so many of all.
    pub count: u64,
    /// What they are held by in the end: `module`, `call`, `thread`, or `c`.
    pub root: &'static str,
    /// From there to the object, a step each.
    pub steps: Vec<String>,
    /// One of the objects.
    pub example: String,
}

/// What the objects of a type retain together.
#[derive(Debug, Clone, Serialize)]
pub struct Retaining {
    /// The type.
    pub name: String,
    /// Its objects.
    pub count: u64,
    /// What would be free without them.
    pub retained_bytes: u64,
}

/// A variable of a module.
#[derive(Debug, Clone, Serialize)]
pub struct Holder {
    /// Module and name.
    pub name: String,
    /// The type of its value.
    pub kind: String,
    /// What would be free without it.
    pub retained_bytes: u64,
}

/// The sets of roots, in the order in which ways are looked for.
const MODULES: u8 = 0;
const CALLS: u8 = 1;
const THREADS: u8 = 2;

/// All references of a heap.
struct Referring {
    numbers: Numbers,
    graph: Graph,
    types: Vec<u32>,
    sizes: Vec<u64>,
}

fn read<M: RemoteMemory>(heap: &mut Heap<'_, M>) -> Referring {
    let numbers = heap.marks.numbers();
    let count = numbers.count() as usize;
    let mut all = Referring {
        graph: Graph::new(),
        types: Vec::with_capacity(count),
        sizes: Vec::with_capacity(count),
        numbers,
    };
    for object in all.numbers.addresses() {
        let looked = heap.look(object, true);
        for reference in &heap.references {
            if let Some(to) = all.numbers.number(reference & !DOUBTFUL) {
                all.graph.edge(to);
            }
        }
        // An object of a class keeps its class.
        let of = looked.and_then(|looked| heap.infos.get(looked.info));
        if let Some(info) = of.filter(|info| info.flags & flag::HEAP_TYPE != 0)
            && let Some(to) = all.numbers.number(info.address)
        {
            all.graph.edge(to);
        }
        all.graph.finish_node();
        all.types.push(looked.map_or(NONE, |looked| looked.info as u32));
        all.sizes.push(looked.map_or(0, |looked| looked.bytes));
    }
    all
}

/// Answers who holds what is `wanted`; `None` when there is no such object or type.
pub fn why<M: RemoteMemory>(heap: &mut Heap<'_, M>, modules: &[u64], wanted: &Wanted) -> Option<Why> {
    let all = read(heap);
    let members: Vec<u32> = match wanted {
        Wanted::Address(address) => vec![all.numbers.number(*address)?],
        Wanted::Type(name) => {
            let is_it = named(&heap.infos, name);
            let nodes = all.types.iter().zip(0..);
            let of = nodes.filter(|(of, _)| is_it.get(**of as usize) == Some(&true));
            of.map(|(_, node)| node).collect()
        }
    };
    if members.is_empty() {
        return None;
    }
    let number = |address: &u64| all.numbers.number(*address);
    let held = std::mem::take(&mut heap.held);
    let of = |call: bool| held.iter().filter(move |held| held.in_call == call);
    let sets = [
        modules.iter().filter_map(number).collect(),
        of(true).filter_map(|held| number(&held.object)).collect(),
        of(false).filter_map(|held| number(&held.object)).collect(),
    ];
    let reached = all.graph.reach(&sets);
    let roots = all.roots(&reached, &sets);
    let dominators = all.graph.dominators(&roots);
    let retained = dominators.retained(&all.sizes);
    let by_type = dominators.retained_by_kind(&all.types, heap.infos.len(), &retained);
    drop(dominators);
    let everything = all.sizes.iter().copied().fold(0, u64::saturating_add);
    let without =
        |is_gone: &dyn Fn(u32) -> bool| everything.saturating_sub(all.graph.alive_without(&roots, &all.sizes, is_gone));
    let together = without(&|node| members.binary_search(&node).is_ok());
    let mut types = by_types(&heap.infos, by_type, SEARCHED / all.types.len().max(1));
    for of in &mut types {
        let is_it = named(&heap.infos, &of.name);
        let is_of = |node: u32| {
            all.types
                .get(node as usize)
                .is_some_and(|of| is_it.get(*of as usize) == Some(&true))
        };
        of.retained_bytes = without(&is_of);
    }
    types.sort_by(|a, b| {
        b.retained_bytes
            .cmp(&a.retained_bytes)
            .then_with(|| a.name.cmp(&b.name))
    });
    types.truncate(MAX_TYPES);
    let size = |node: &u32| all.sizes.get(*node as usize).copied().unwrap_or(0);
    let mut words = Words {
        heap,
        all: &all,
        reached: &reached,
        held: held.iter().map(|held| (held.object, held)).collect(),
        names: HashMap::new(),
    };
    let ways = words.ways(&members);
    Some(Why {
        of: match wanted {
            Wanted::Type(name) => name.clone(),
            Wanted::Address(address) => format!("{address:#x} ({})", words.kind_name(*members.first()?)),
        },
        count: members.len() as u64,
        bytes: members.iter().map(size).sum(),
        retained_bytes: together,
        sampled: members.len().min(SAMPLES),
        ways,
        types,
        globals: words.globals(modules, &retained),
    })
}

/// Which types have this name: a class that was made again is another one.
fn named(infos: &[TypeInfo], name: &str) -> Vec<bool> {
    infos.iter().map(|info| &*info.name == name).collect()
}

/// The types whose objects retain the most, each for itself; those of one name are one.
fn by_types(infos: &[TypeInfo], retained: Vec<u64>, most: usize) -> Vec<Retaining> {
    let mut rows: BTreeMap<&str, Retaining> = BTreeMap::new();
    for (info, retained) in infos.iter().zip(retained).filter(|(_, retained)| *retained > 0) {
        let row = rows.entry(&info.name).or_insert_with(|| Retaining {
            name: info.name.to_string(),
            count: 0,
            retained_bytes: 0,
        });
        row.count += info.count;
        row.retained_bytes = row.retained_bytes.saturating_add(retained);
    }
    let mut rows: Vec<Retaining> = rows.into_values().collect();
    rows.sort_by(|a, b| {
        b.retained_bytes
            .cmp(&a.retained_bytes)
            .then_with(|| a.name.cmp(&b.name))
    });
    rows.truncate(most.clamp(MAX_TYPES, 10 * MAX_TYPES));
    rows
}

impl Referring {
    /// All that is held from outside.
    fn roots(&self, reached: &Reached, sets: &[Vec<u32>]) -> Vec<u32> {
        let mut roots: Vec<u32> = sets.concat();
        roots.extend(&reached.roots);
        roots.sort_unstable();
        roots.dedup();
        roots
    }
}

/// Puts ways into words.
struct Words<'h, 'a, M> {
    heap: &'h mut Heap<'a, M>,
    all: &'h Referring,
    reached: &'h Reached,
    held: HashMap<u64, &'h Held>,
    /// What the values of a namespace are called.
    names: HashMap<u64, HashMap<u64, String>>,
}

impl<M: RemoteMemory> Words<'_, '_, M> {
    fn kind(&self, node: u32) -> Option<Kind> {
        let of = *self.all.types.get(node as usize)?;
        self.heap.infos.get(of as usize).map(|info| info.kind)
    }

    fn kind_name(&self, node: u32) -> String {
        let of = self.all.types.get(node as usize);
        let info = of.and_then(|of| self.heap.infos.get(*of as usize));
        info.map_or_else(|| "object".to_owned(), |info| info.name.to_string())
    }

    fn address(&self, node: u32) -> u64 {
        self.all.numbers.address(node).unwrap_or(0)
    }

    /// The ways to some of the members, those that read the same together.
    fn ways(&mut self, members: &[u32]) -> Vec<Way> {
        let step = members.len().div_ceil(SAMPLES).max(1);
        let sampled = members.len().div_ceil(step);
        let mut groups: BTreeMap<(u8, Vec<String>), (usize, u32)> = BTreeMap::new();
        for node in members.iter().step_by(step) {
            let from = self.reached.from.get(*node as usize).copied().unwrap_or(u8::MAX);
            let steps = self.steps(*node, from);
            groups.entry((from, steps)).or_insert((0, *node)).0 += 1;
        }
        let mut ways: Vec<Way> = groups
            .into_iter()
            .map(|((from, steps), (count, node))| Way {
                sampled: count,
                count: (count as u64 * members.len() as u64).div_ceil(sampled as u64),
                root: match from {
                    MODULES => "module",
                    CALLS => "call",
                    THREADS => "thread",
                    _ => "c",
                },
                steps,
                example: format!("{:#x}", self.address(node)),
            })
            .collect();
        ways.sort_by(|a, b| b.sampled.cmp(&a.sampled).then_with(|| a.steps.cmp(&b.steps)));
        ways
    }

    /// The way to a node, a step each; the node itself is the last.
    fn steps(&mut self, node: u32, from: u8) -> Vec<String> {
        let mut way = vec![node];
        let mut at = node;
        while way.len() < MAX_WAY {
            match self.reached.before.get(at as usize) {
                Some(before) if *before != NONE => at = *before,
                _ => break,
            }
            way.push(at);
        }
        way.reverse();
        let mut steps = Vec::new();
        if from != MODULES {
            steps.push(self.root(at, from));
        }
        // A module waits for the name of what is in it.
        let mut module: Option<String> = None;
        for (i, node) in way.iter().enumerate() {
            let behind = |by: usize| i.checked_sub(by).and_then(|i| way.get(i)).copied();
            let table = from == MODULES && i == 1;
            let name = behind(1).and_then(|before| self.name_in(before, *node, behind(2), table));
            let is_last = i + 1 == way.len();
            if !is_last && (from == MODULES && i == 0 || self.is_namespace(*node, behind(1))) {
                continue;
            }
            // The call was named already.
            if !is_last && from == CALLS && i == 0 && self.kind(*node) == Some(Kind::Frame) {
                continue;
            }
            let kind = self.kind_name(*node);
            if table && kind == "module" && !is_last {
                module = name;
                continue;
            }
            let step = match (module.take(), name) {
                (Some(module), Some(name)) => format!("{module}.{name} ({kind})"),
                (Some(module), None) => format!("module {module}: {kind}"),
                (None, Some(name)) => format!(".{name} ({kind})"),
                (None, None) => kind,
            };
            steps.push(step);
        }
        if steps.len() > MAX_STEPS {
            let rest = steps.split_off(steps.len() - MAX_STEPS / 2);
            let cut = steps.len() - MAX_STEPS / 2;
            steps.truncate(MAX_STEPS / 2);
            steps.push(format!("({cut} more)"));
            steps.extend(rest);
        }
        // A run of the same steps is a chain.
        steps.dedup();
        steps
    }

    fn root(&mut self, node: u32, from: u8) -> String {
        let address = self.address(node);
        match from {
            MODULES => "modules".to_owned(),
            CALLS => {
                let code = match self.kind(node) {
                    // Up to 3.10 the call itself is an object.
                    Some(Kind::Frame) => self
                        .heap
                        .blocks
                        .word(address + self.heap.at.base.frame.code)
                        .unwrap_or(0),
                    _ => self.held.get(&address).map_or(0, |held| held.code),
                };
                match self.code_name(code) {
                    Some(name) => format!("variable of the running {name}()"),
                    None => "variable of a running call".to_owned(),
                }
            }
            THREADS => "state of a thread".to_owned(),
            _ => "held from C, or by nothing".to_owned(),
        }
    }

    /// What a code object is called.
    fn code_name(&mut self, code: u64) -> Option<String> {
        let layout = self.heap.at.base.code;
        let name = self
            .heap
            .blocks
            .word(code.checked_add(layout.qualname.unwrap_or(layout.name))?)?;
        self.string(name)
    }

    fn string(&mut self, object: u64) -> Option<String> {
        let info = self.heap.type_of(object)?;
        if self.heap.infos.get(info)?.kind != Kind::Str {
            return None;
        }
        crate::frames::text::read_str(self.heap.blocks.memory(), RemoteAddr(object), &self.heap.at.base).ok()
    }

    /// True for the dict of a module, a class or an object.
    fn is_namespace(&self, node: u32, before: Option<u32>) -> bool {
        let Some(before) = before else { return false };
        if self.kind(node) != Some(Kind::Dict) {
            return false;
        }
        match self.kind(before) {
            Some(Kind::Type) => true,
            Some(Kind::Other) => {
                let of = self
                    .all
                    .types
                    .get(before as usize)
                    .and_then(|of| self.heap.infos.get(*of as usize));
                // A module, or an object with a `__dict__` that was made of a class.
                of.is_some_and(|info| &*info.name == "module" || info.flags & flag::HEAP_TYPE != 0 && info.dict != 0)
            }
            _ => false,
        }
    }

    /// What `node` is called in what refers to it, where that is a namespace.
    fn name_in(&mut self, holder: u32, node: u32, before: Option<u32>, is_table: bool) -> Option<String> {
        let (holder_at, at) = (self.address(holder), self.address(node));
        let of = *self.all.types.get(holder as usize)? as usize;
        let info = self.heap.infos.get(of)?;
        let has_names = match info.kind {
            Kind::Dict => is_table || self.is_namespace(holder, before),
            _ => info.flags & flag::MANAGED_DICT != 0,
        };
        if !has_names {
            return None;
        }
        if !self.names.contains_key(&holder_at) {
            let names = self.namespace(holder_at, of);
            // One object's names are asked for once or twice, a module's for each way.
            if self.names.len() >= 64 {
                self.names.clear();
            }
            self.names.insert(holder_at, names);
        }
        self.names.get(&holder_at)?.get(&at).cloned()
    }

    /// The names of all values of a dict, or of an object whose values are not in one.
    fn namespace(&mut self, holder: u64, info: usize) -> HashMap<u64, String> {
        let mut names = HashMap::new();
        for (key, value) in self.heap.pairs(holder, info, MAX_ENTRIES) {
            if let Some(name) = self.string(key) {
                names.entry(value).or_insert(name);
            }
        }
        names
    }

    /// The variables of modules that retain the most.
    fn globals(&mut self, modules: &[u64], retained: &[u64]) -> Vec<Holder> {
        let mut found: Vec<(u64, String, u32)> = Vec::new();
        for table in modules {
            let Some(info) = self.heap.type_of(*table) else {
                continue;
            };
            for (key, module) in self.heap.pairs(*table, info, MAX_ENTRIES) {
                let Some(name) = self.string(key) else { continue };
                let dict = module.checked_add(self.heap.at.objects.module_dict);
                let Some(dict) = dict.and_then(|at| self.heap.blocks.word(at)) else {
                    continue;
                };
                let Some(info) = self.heap.type_of(dict) else { continue };
                if self.heap.infos.get(info).is_none_or(|info| info.kind != Kind::Dict) {
                    continue;
                }
                for (key, value) in self.heap.pairs(dict, info, MAX_ENTRIES) {
                    let Some(node) = self.all.numbers.number(value) else {
                        continue;
                    };
                    let bytes = retained.get(node as usize).copied().unwrap_or(0);
                    // A module holds itself in its parent.
                    if self.kind_name(node) != "module"
                        && let Some(key) = self.string(key)
                    {
                        found.push((bytes, format!("{name}.{key}"), node));
                    }
                }
            }
        }
        found.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.len().cmp(&b.1.len())));
        found.dedup_by_key(|(_, _, node)| *node);
        found.truncate(MAX_HOLDERS);
        let holder = |(retained_bytes, name, node): (u64, String, u32)| Holder {
            name,
            kind: self.kind_name(node),
            retained_bytes,
        };
        found.into_iter().map(holder).collect()
    }
}
