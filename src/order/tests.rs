//! Tests with requests as programs send them: in order, at random, and from several threads.

use std::collections::BTreeSet;

use super::*;

/// A learner for tensors with these names, whose order in the files is the order of `files`. Also
/// returns the sorted names.
fn walk(files: &[&str]) -> (RequestLearner, Vec<String>) {
    let mut names: Vec<String> = files.iter().map(|&name| name.to_owned()).collect();
    names.sort();
    let place = |name: &str| names.iter().position(|other| other == name).unwrap() as u32;
    let mut natural = names.clone();
    natural.sort_by(|a, b| natural_cmp(a, b));
    let mut orders = Orders::default();
    orders.add(Order::Shard, files.iter().map(|name| place(name)).collect());
    orders.add(Order::Natural, natural.iter().map(|name| place(name)).collect());
    orders.add(Order::Name, (0..names.len() as u32).collect());
    (RequestLearner::new(orders, None), names)
}

/// Layers 0 to 11 with three tensors each. In the files they have another order than by name.
fn model() -> (RequestLearner, Vec<String>) {
    let layers = (0..12).flat_map(|n| ["q", "k", "v"].map(|part| format!("layers.{n}.{part}")));
    let files: Vec<String> = std::iter::once("embed".to_owned()).chain(layers).collect();
    walk(&files.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Sends these requests from several readers in turns. Returns how many of the requests were
/// predicted, and how many tensors were predicted in all.
fn foretold(walk: &mut RequestLearner, requests: &[usize], readers: u64) -> (usize, usize) {
    let (mut right, mut expected) = (0, BTreeSet::new());
    for (number, &tensor) in requests.iter().enumerate() {
        right += usize::from(expected.contains(&tensor));
        walk.ask(tensor, number as u64 % readers);
        expected.extend(walk.next().take(2 * readers as usize - 1));
    }
    (right, expected.len())
}

fn in_order(walk: &RequestLearner, order: Order) -> Vec<usize> {
    let sequence = walk.orders.sequences.iter().find(|one| one.orders.contains(&order)).unwrap();
    sequence.tensors.iter().map(|&tensor| tensor as usize).collect()
}

#[test]
fn each_order_is_known_after_two_tensors() {
    for order in [Order::Shard, Order::Name, Order::Natural] {
        let (mut walk, _) = model();
        let requests = in_order(&walk, order);
        let (right, expected) = foretold(&mut walk, &requests, 1);
        // A prediction can be wrong once at each place where two orders differ for the first time.
        assert!(right >= requests.len() - 6 && expected <= requests.len(), "{order:?}: {right}");
        assert_eq!(walk.order(), Some(order));
    }
}

#[test]
fn a_walk_that_begins_in_the_middle_is_known_after_three() {
    let (mut walk, _) = model();
    let requests = in_order(&walk, Order::Name);
    assert!(!walk.ask(requests[13], 0));
    assert!(!walk.ask(requests[14], 0));
    assert!(walk.ask(requests[15], 0));
    assert_eq!(walk.next().next(), Some(requests[16]));
}

#[test]
fn an_order_that_was_right_elsewhere_is_believed_at_its_first_tensor() {
    let (walk, _) = model();
    let first = in_order(&walk, Order::Shard)[0];
    let mut again = RequestLearner::new(walk.orders.clone(), Some(Order::Shard));
    assert!(again.ask(first, 0));
    let mut elsewhere = RequestLearner::new(walk.orders.clone(), Some(Order::Shard));
    assert!(!elsewhere.ask(in_order(&walk, Order::Shard)[9], 0));
}

#[test]
fn four_threads_that_share_one_order_overtake_each_other() {
    for order in [Order::Shard, Order::Name, Order::Natural] {
        let (mut walk, _) = model();
        let mut requests = in_order(&walk, order);
        for at in (0..requests.len() - 3).step_by(3) {
            requests.swap(at, at + 2);
        }
        let (right, _) = foretold(&mut walk, &requests, 4);
        assert!(right * 4 >= requests.len() * 3, "{order:?}: {right}");
    }
}

#[test]
fn threads_with_a_part_each_have_cursors_of_their_own_and_none_runs_into_the_next_part() {
    let (mut walk, _) = model();
    let order = in_order(&walk, Order::Shard);
    let ranks = (0..9).flat_map(|n| (0..4).map(move |part| part * 9 + n));
    let requests: Vec<usize> = ranks.map(|rank: usize| order[rank]).collect();
    for (number, &tensor) in requests.iter().enumerate() {
        let expected = walk.ask(tensor, number as u64 % 4);
        assert!(expected || number < 16, "request {number}");
        if tensor == order[8] {
            // This is the last tensor of the first part. Only the last tensors of the other parts
            // were not requested yet.
            let left = [17, 26, 35, 36].map(|rank| order[rank]);
            assert_eq!(walk.next().collect::<Vec<_>>(), left);
        }
    }
}

#[test]
fn random_requests_are_seldom_believed() {
    let names: Vec<String> = (0..500).map(|n| format!("t{n:03}")).collect();
    let (mut walk, _) = walk(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let (mut at, mut believed) = (7_u64, 0);
    for _ in 0..2000 {
        at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        believed += usize::from(walk.ask((at >> 33) as usize % 500, 0));
    }
    assert!(believed < 20, "{believed}");
}

#[test]
fn a_walk_that_turns_random_is_no_longer_believed_and_a_new_one_is() {
    let names: Vec<String> = (0..100).map(|n| format!("t{n:03}")).collect();
    let (mut walk, _) = walk(&names.iter().map(String::as_str).collect::<Vec<_>>());
    (0..50).for_each(|at| assert!(walk.ask(at, 0) || at < 1));
    for at in [90, 55, 70, 62, 85] {
        assert!(!walk.ask(at, 0));
    }
    assert!(!walk.ask(20, 0) && !walk.ask(21, 0) && walk.ask(22, 0));
}

#[test]
fn a_second_pass_is_expected_too() {
    let (mut walk, _) = model();
    let order = in_order(&walk, Order::Shard);
    for pass in 0..3 {
        for (rank, &tensor) in order.iter().enumerate() {
            assert!(walk.ask(tensor, 0) || (pass, rank) == (0, 0), "pass {pass}, {rank}");
            assert_eq!(
                walk.next().next(),
                order.get(rank + 1).copied().filter(|_| pass + rank > 0)
            );
        }
    }
}

#[test]
fn a_tensor_that_is_asked_for_twice_in_a_row_changes_nothing() {
    let (mut walk, _) = model();
    let order = in_order(&walk, Order::Shard);
    for &tensor in &order[..6] {
        walk.ask(tensor, 0);
        walk.ask(tensor, 0);
    }
    assert!(walk.ask(order[6], 0));
    assert_eq!(walk.next().next(), Some(order[7]));
}
