use super::*;
use crate::collect::names::NOT_KEPT;

fn frame(line: u32) -> NamedFrame {
    NamedFrame {
        file: "app.py".into(),
        line,
        function: "f".into(),
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn alloc(at: u64, trace: u32, size: u64) -> Event {
    Event::Alloc {
        at: seconds(at),
        trace,
        size,
        born: at * 1000,
        domain: 0,
        thread: 0,
    }
}

fn free(at: u64, trace: u32, size: u64, born: u64) -> Event {
    Event::Free {
        at: seconds(at),
        trace,
        size,
        born: born * 1000,
    }
}

fn watch(period: u64) -> Watch {
    Watch::new(period, OwnCode::default(), None)
}

/// With every allocation recorded all is exact.
#[test]
fn amounts_are_those_of_the_events() {
    let mut watch = watch(1);
    watch.events(&[Event::Trace(vec![frame(1), frame(9)]), Event::Trace(vec![frame(2)])]);
    watch.events(&[
        alloc(2, 1, 100),
        alloc(2, 2, 1000),
        alloc(4, 1, 300),
        free(5, 2, 1000, 2),
    ]);
    let picture = watch.picture(seconds(6));
    assert_eq!((picture.sampled, picture.window, picture.stacks.len()), (3, 6.0, 2));
    let [first, second] = [&picture.stacks[0].amount, &picture.stacks[1].amount];
    assert_eq!(
        (first.live.bytes, first.live.objects, first.allocated),
        (400.0, 2.0, 400.0)
    );
    // 100 bytes for 4 s, and 300 for 2 s.
    assert_eq!(first.age(), Some(2.5));
    assert_eq!(
        first.growth,
        Bounded {
            value: 400.0,
            variance: 0.0
        }
    );
    assert_eq!((second.live.bytes, second.allocated, second.age()), (0.0, 1000.0, None));
    assert_eq!((picture.total.live.bytes, picture.total.allocated), (400.0, 1400.0));
    assert_eq!(
        watch.frames(picture.stacks[0].number).cloned().collect::<Vec<_>>(),
        [frame(1), frame(9)]
    );
}

/// Of one line two threads, one of which gets its name late; what is of no thread stands apart.
#[test]
fn threads_are_told_apart_and_named() {
    let mut watch = watch(1);
    let by = |trace: u32, thread: u32, size: u64, domain: u8| Event::Alloc {
        at: seconds(1),
        trace,
        size,
        born: 1000,
        domain,
        thread,
    };
    watch.events(&[
        Event::Trace(vec![frame(1)]),
        by(1, 77, 100, 2),
        Event::Trace(vec![frame(1)]),
        Event::Thread(78, "worker".to_owned()),
        by(2, 78, 1000, 1),
        Event::Trace(vec![frame(1)]),
        by(3, 0, 10, 2),
        by(1, 77, 1, 2),
    ]);
    let threads = |watch: &Watch| -> Vec<(Option<String>, f64)> {
        let stacks = watch.picture(seconds(2)).stacks;
        let row = |stack: &StackNow| (stack.thread.as_deref().map(str::to_owned), stack.amount.live.bytes);
        stacks.iter().map(row).collect()
    };
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(
        threads(&watch),
        [(text("77"), 101.0), (text("worker (78)"), 1000.0), (None, 10.0)]
    );
    // A name that comes late, also with what is said again for files; a free finds its thread.
    let request = crate::collect::files::SaveRequest {
        base: "run".into(),
        facts: crate::profile::facts::Facts::default(),
        at: seconds(2),
    };
    watch.events(&[
        Event::Save(Box::new(request)),
        Event::Thread(77, "MainThread".to_owned()),
        Event::Trace(vec![frame(1)]),
    ]);
    watch.events(&[free(3, 2, 1000, 1)]);
    assert_eq!(threads(&watch)[0], (text("MainThread (77)"), 101.0));
    assert_eq!(threads(&watch)[1].1, 0.0);
    assert_eq!(watch.different(&[1, 2, 3]), 1);
    let known = Known {
        stacks: &watch.stacks,
        names: &watch.names,
        memory: &[],
        has_native: false,
    };
    assert_eq!(known.origin(1), (text("obj"), text("MainThread")));
    assert_eq!(known.origin(3), (text("obj"), None));
    assert_eq!(known.origin(0), (None, None));
}

/// With very many stacks threads are the first that are no longer told apart.
#[test]
fn many_stacks_have_no_threads() {
    let mut watch = watch(1);
    for number in 0..MAX_STACKS as u32 + 500 {
        let thread = number % 2 + 1;
        watch.events(&[
            Event::Trace(vec![frame(number / 2)]),
            Event::Alloc {
                at: seconds(1),
                trace: number + 1,
                size: 10,
                born: 1000,
                domain: 2,
                thread,
            },
        ]);
    }
    let picture = watch.picture(seconds(2));
    assert_eq!(picture.total.live.bytes, 10.0 * (MAX_STACKS as f64 + 500.0));
    let named = picture.stacks.iter().filter(|stack| stack.thread.is_some()).count();
    assert_eq!(named, MAX_APART - 1);
    assert!(picture.stacks.len() < MAX_STACKS && picture.stacks.iter().all(|stack| &*stack.leaf.file != NOT_KEPT));
}

#[test]
fn growth_is_that_of_the_last_minute() {
    let mut watch = watch(1);
    watch.events(&[Event::Trace(vec![frame(1)]), Event::Trace(vec![frame(2)])]);
    // 1,000 bytes a second for 100 s, then nothing; the other site begins late.
    for second in 0..400 {
        if second < 100 {
            watch.events(&[alloc(second, 1, 1000)]);
        }
        if second == 390 {
            watch.events(&[alloc(second, 2, 70)]);
        }
        watch.tick(seconds(second), None);
        let picture = watch.picture(seconds(second));
        let growth = picture.stacks[0].amount.growth.value;
        assert!(picture.window <= 66.0, "{}", picture.window);
        if (5..100).contains(&second) {
            assert!(
                (growth / picture.window / 1000.0 - 1.0).abs() < 0.25,
                "{second}: {growth} in {}",
                picture.window
            );
        }
        if second > 170 {
            assert_eq!((growth, picture.stacks[0].amount.allocated), (0.0, 0.0), "{second}");
        }
    }
    let picture = watch.picture(seconds(400));
    assert_eq!(picture.stacks[1].amount.growth.value, 70.0);
    let past = watch.past(&[picture.stacks[0].number, picture.stacks[1].number], seconds(400));
    assert_eq!(past.last(), Some(&100_070.0));
    assert_eq!(watch.past(&[picture.stacks[0].number], seconds(0)), [1000.0]);
}

#[test]
fn a_baseline_shows_what_has_changed_since() {
    let mut watch = watch(1);
    watch.events(&[Event::Trace(vec![frame(1)]), Event::Trace(vec![frame(2)])]);
    watch.events(&[alloc(1, 1, 100), alloc(1, 2, 500)]);
    watch.set_baseline(seconds(2));
    watch.events(&[alloc(3, 1, 11), free(3, 2, 500, 1)]);
    let picture = watch.picture(seconds(4));
    let since: Vec<_> = picture
        .stacks
        .iter()
        .map(|stack| (stack.amount.since.value, stack.amount.objects_since))
        .collect();
    assert_eq!(
        (since, picture.baseline),
        (vec![(11.0, 1.0), (-500.0, -1.0)], Some(seconds(2)))
    );
    watch.clear_baseline();
    assert_eq!(watch.picture(seconds(4)).stacks[0].amount.since, Bounded::default());
}

/// 4,000 samples, of which every fourth survives a period that is four times as long; traces get new numbers.
#[test]
fn a_longer_period_changes_no_number_by_itself() {
    let mut watch = watch(1 << 17);
    watch.events(&[Event::Trace(vec![frame(1)]), Event::Trace(vec![frame(2)])]);
    for number in 0..4000 {
        watch.events(&[alloc(number / 100, 2, 64)]);
    }
    watch.tick(seconds(40), None);
    let before = watch.picture(seconds(40));
    let again = |number: u64| Event::Alloc {
        at: seconds(40),
        trace: 1,
        size: 64,
        born: 40 * number,
        domain: 0,
        thread: 0,
    };
    let mut events = vec![
        Event::Period {
            at: seconds(40),
            period: 1 << 19,
        },
        Event::Trace(vec![frame(2)]),
    ];
    events.extend((0..1000).map(again));
    watch.events(&events);
    let after = watch.picture(seconds(40));
    assert_eq!((after.sampled, after.period), (before.sampled, 1 << 19));
    let (old, new) = (&before.stacks[0], &after.stacks[0]);
    assert_eq!((old.number, &old.leaf, after.stacks.len()), (new.number, &new.leaf, 1));
    assert!((new.amount.live.bytes / old.amount.live.bytes - 1.0).abs() < 1e-3);
    assert_eq!(new.amount.allocated, old.amount.allocated);
    assert!((new.amount.age().unwrap() - old.amount.age().unwrap()).abs() < 1.0);
    // Samples went and others came: a difference to before is less certain than either.
    assert!(new.amount.growth.variance >= new.amount.live.variance);
    watch.events(
        &(0..1000)
            .map(|number| free(41, 1, 64, 40 * number / 1000))
            .collect::<Vec<_>>(),
    );
    assert_eq!(watch.picture(seconds(42)).total.live.bytes, 0.0);
}

#[test]
fn what_a_save_says_again_has_not_happened() {
    use crate::collect::files::SaveRequest;
    let mut watch = watch(1);
    watch.events(&[Event::Trace(vec![frame(1)]), alloc(1, 1, 100)]);
    let request = SaveRequest {
        base: "run".into(),
        facts: crate::profile::facts::Facts::default(),
        at: seconds(2),
    };
    watch.events(&[
        Event::Save(Box::new(request)),
        Event::Trace(vec![frame(1)]),
        alloc(2, 1, 100),
    ]);
    watch.events(&[Event::Trace(vec![frame(2)]), alloc(3, 2, 5)]);
    let picture = watch.picture(seconds(4));
    let live: Vec<_> = picture
        .stacks
        .iter()
        .map(|stack| (stack.leaf.line, stack.amount.live.bytes))
        .collect();
    assert_eq!((live, picture.sampled), (vec![(1, 100.0), (2, 5.0)], 2));
}

#[test]
fn memory_is_bounded_and_nothing_is_left_out() {
    let mut watch = watch(1);
    for number in 0..MAX_STACKS as u32 + 500 {
        watch.events(&[Event::Trace(vec![frame(number)]), alloc(1, number + 1, 10)]);
    }
    let picture = watch.picture(seconds(2));
    assert_eq!(picture.stacks.len(), MAX_STACKS);
    assert_eq!(picture.total.live.bytes, 10.0 * (MAX_STACKS as f64 + 500.0));
    assert_eq!(&*picture.stacks[0].leaf.file, NOT_KEPT);
    // An index that nobody announced is damage, not a reason to panic.
    watch.events(&[alloc(2, u32::MAX, 10), free(2, 0, 10, 2)]);
    for second in 0..3 * MAX_MEMORY as u64 {
        watch.memory.push((0, MemorySample::default()));
        if second % 1000 == 0 {
            watch.tick(seconds(second), Some(MemorySample::default()));
            watch.memory.truncate(MAX_MEMORY);
        }
    }
    assert!(watch.memory.len() <= MAX_MEMORY);
}

/// A leak of 40 samples a second for a minute, beside a cache that is always replaced.
#[test]
fn the_verdict_is_that_of_the_leaks_command() {
    let mut watch = watch(1 << 17);
    watch.events(&[Event::Trace(vec![frame(1)]), Event::Trace(vec![frame(2)])]);
    for tick in 0..2400_u64 {
        let at = Duration::from_millis(tick * 25);
        let (size, born) = (2000, tick * 25);
        let (leak, churn) = (1, 2);
        watch.events(&[
            Event::Alloc {
                at,
                trace: leak,
                size,
                born,
                domain: 0,
                thread: 0,
            },
            Event::Alloc {
                at,
                trace: churn,
                size,
                born,
                domain: 0,
                thread: 0,
            },
        ]);
        if let Some(old) = tick.checked_sub(100) {
            watch.events(&[Event::Free {
                at,
                trace: churn,
                size,
                born: old * 25,
            }]);
        }
    }
    let report = watch.judge(seconds(60));
    assert_eq!(report.verdict, crate::report::leaks::Overall::Leak);
    let leaks: Vec<u32> = report
        .leaks
        .iter()
        .filter(|site| site.share.is_some())
        .map(|site| site.stack[0].line)
        .collect();
    assert_eq!(leaks, [1]);
    let expected = 40.0 * 60.0 * watch.weights.of(2000).objects * 2000.0;
    let (low, high) = report.leaks[0].ci95;
    assert!((low..high).contains(&expected), "{low} {expected} {high}");
}

/// Native code asks for much that it never touches, so what the process does refutes less; and the report says what was recorded.
#[test]
fn native_memory_is_judged_as_in_a_finished_recording() {
    for has_native in [false, true] {
        let mut watch = watch(1 << 17).with_native(has_native);
        assert_eq!(watch.judge(seconds(60)).has_native, has_native);
    }
}
