//! A small heap, whole and damaged.

use super::heap::Heap;
use super::layout::Layouts;
use super::marks::{Marks, Met};
use super::{count, lists};
use crate::census::kinds::flag;
use crate::dump::image::{BASE, Image};
use crate::frames::SUPPORTED_MINORS;
use crate::frames::layout::Layout;
use rand::{RngExt, SeedableRng};
use std::time::{Duration, Instant};

const BYTES: usize = 0x8000;
const OWNER: u64 = BASE;
const META: u64 = BASE + 0x2800;
const LIST: u64 = BASE + 0x3000;
const STR: u64 = BASE + 0x3400;
const OBJECTS: u64 = BASE + 0x5000;
const NAMES: u64 = BASE + 0x4000;
const LISTS: u64 = 20;

impl Image {
    fn put_type(&mut self, at: &Layouts, address: u64, name: &str, flags: u64, basic: u64) {
        const READY: u64 = 1 << 12;
        let text = NAMES + (address - META) / 8;
        self.text(text, name.as_bytes());
        self.put(address, 1);
        self.put(address + at.base.ob_type, META);
        self.put(address + at.base.tp_name, text);
        self.put(address + at.objects.type_basicsize, basic);
        self.put(address + at.objects.type_flags, flags | READY);
    }
}

/// `LISTS` lists in the second generation, each with the same string of four letters twice, and room for one more.
fn image(at: &Layouts) -> Image {
    let mut image = Image::new(BYTES);
    let lists = at.census.lists.unwrap();
    image.put_type(at, META, "type", flag::TYPE | flag::HAVE_GC, 880);
    image.put_type(at, LIST, "list", flag::LIST | flag::HAVE_GC, 40);
    image.put_type(at, STR, "str", flag::STR, 80);
    let first = if lists.by_pointer {
        OWNER + 0x2600
    } else {
        OWNER + lists.first
    };
    if lists.by_pointer {
        image.put(OWNER + lists.first, first);
    }
    let permanent = OWNER + lists.permanent;
    for head in [first, first + lists.step, first + 2 * lists.step, permanent] {
        image.put(head, head);
        image.put(head + 8, head);
    }
    let text = OBJECTS;
    image.put(text, 40);
    image.put(text + at.base.ob_type, STR);
    image.put(text + at.base.unicode.length, 4);
    // One byte a character, compact, ASCII.
    let state = (1 | 1 << 3 | 1 << 4) << at.base.unicode.kind_bit;
    image.put(text + at.base.unicode.state, state);
    let ring = first + lists.step;
    let node = |i: u64| OBJECTS + 0x100 + i * 0x80;
    for i in 0..LISTS {
        let (node, object) = (node(i), node(i) + lists.head);
        let prev = if i == 0 { ring } else { self::node_before(i) };
        let next = if i == LISTS - 1 {
            ring
        } else {
            OBJECTS + 0x100 + (i + 1) * 0x80
        };
        image.put(node, next);
        image.put(node + 8, prev);
        image.put(object, 1);
        image.put(object + at.base.ob_type, LIST);
        image.put(object + at.ob_size(), 2);
        let items = object + 0x40 - lists.head + 8;
        image.put(object + at.census.list_items, items);
        image.put(object + at.census.list_allocated, 3);
        image.put(items, text);
        image.put(items + 8, text);
    }
    image.put(ring, node(0));
    image.put(ring + 8, node(LISTS - 1));
    image
}

fn node_before(i: u64) -> u64 {
    OBJECTS + 0x100 + (i - 1) * 0x80
}

fn walk<'a>(image: &'a Image, at: &Layouts) -> Heap<'a, Image> {
    let marks = Marks::new(std::iter::once(BASE..BASE + BYTES as u64).collect());
    let mut heap = Heap::new(image, *at, marks).unwrap();
    let lists = at.census.lists.unwrap();
    let _ = lists::mark(&mut heap, &lists, OWNER);
    // As roots are: a word that may be anything.
    heap.marks.mark(OBJECTS + 0x18, Met::Doubtful);
    count(&mut heap, Instant::now(), Duration::from_secs(60), false);
    heap
}

fn layouts() -> impl Iterator<Item = (u8, Layouts)> {
    SUPPORTED_MINORS.filter_map(|minor| {
        let at = Layouts::of(&Layout::of_minor(minor).unwrap()).unwrap();
        let lists = at.census.lists.unwrap();
        // The image has room for the structs of these: later ones have the same lists, further on.
        (lists.first.max(lists.permanent) < 0x2600).then_some((minor, at))
    })
}

#[test]
fn lists_and_what_they_hold_are_counted() {
    let mut tried = 0;
    for (minor, at) in layouts() {
        let image = image(&at);
        let heap = walk(&image, &at);
        let of = |name: &str| {
            let info = heap.infos.iter().find(|info| &*info.name == name).unwrap();
            (info.count, info.tracked, info.bytes)
        };
        let head = at.collector_head();
        assert_eq!(of("list"), (LISTS, LISTS, LISTS * (head + 40 + 24)), "3.{minor}");
        assert_eq!(of("str"), (1, 0, at.base.unicode.ascii_data + 5), "3.{minor}");
        assert_eq!(heap.doubts.all(), 0, "3.{minor}: {:?}", heap.doubts);
        tried += 1;
    }
    assert!(tried >= 5, "{tried}");
}

#[test]
fn damage_is_left_out_and_the_walk_ends() {
    let mut random = rand::rngs::SmallRng::seed_from_u64(17);
    for (_, at) in layouts() {
        let sound = image(&at);
        for _ in 0..150 {
            let mut image = sound.clone();
            for _ in 0..random.random_range(1..60) {
                let to = BASE + 8 * random.random_range(0..BYTES as u64 / 8);
                let near = BASE + 8 * random.random_range(0..BYTES as u64 / 8);
                let value = match random.random_range(0..4) {
                    0 => near,
                    1 => random.random(),
                    2 => 1 << random.random_range(0..64),
                    _ => [LIST, STR, META, OBJECTS, OBJECTS + 0x110][random.random_range(0..5)],
                };
                image.put(to, value);
            }
            let heap = walk(&image, &at);
            let bytes: u64 = heap.infos.iter().map(|info| info.bytes).sum();
            let count: u64 = heap.infos.iter().map(|info| info.count).sum();
            assert!(count <= BYTES as u64 / 8, "{count}");
            // No object is larger than the memory that there is, but for what a type says before it.
            assert!(bytes <= count * (BYTES as u64 * 4 + (1 << 20)), "{bytes}");
        }
    }
}
