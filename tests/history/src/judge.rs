//! Whether the operations of one register have an order.
//!
//! Values are set once each, which says much about operations without an answer before any search: one whose value was
//! seen has happened before whoever saw it returned; one whose value nobody saw may as well never have happened, unless
//! an exchange found another value than it expected. What is left is up to [`crate::search`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::history::{Action, Answer, Operation, Value};
use crate::search::{self, Effect, Found, Step};

/// Whether the operations of one register have an order.
pub(crate) fn judge(operations: &[Operation], initial: Value) -> Found {
    let mut steps: Vec<Step> = operations.iter().filter_map(step).collect();
    determine(&mut steps);
    let mut set: BTreeSet<Value> = BTreeSet::from([initial]);
    set.extend(steps.iter().filter_map(|step| step.effect.sets()).map(Some));
    // Without a search, which would try everything before it.
    let from_nowhere = |step: &Step| step.effect.needs().is_some_and(|seen| !set.contains(&seen));
    if steps
        .iter()
        .any(|step| step.returned.is_some() && from_nowhere(step))
    {
        return Found::Contradiction;
    }
    search::order(&steps, initial)
}

/// What the search needs of an operation; `None` if it has no effect.
fn step(operation: &Operation) -> Option<Step> {
    let (effect, returned) = match (operation.action, operation.answer) {
        (_, Answer::Failed) | (Action::Read, Answer::Unknown) => return None,
        (Action::Read, Answer::Value(value)) => (Effect::Sees(value), operation.returned),
        (Action::Exchange { expected, .. }, Answer::Differs) => {
            (Effect::SeesOther(expected), operation.returned)
        }
        (action, answer) => {
            let returned = operation.returned.filter(|_| answer == Answer::Done);
            match action {
                Action::Read => return None,
                Action::Write(new) => (Effect::Sets(new), returned),
                Action::Exchange { expected, new } => (Effect::Exchanges(expected, new), returned),
            }
        }
    };
    Some(Step {
        effect,
        invoked: operation.invoked,
        returned,
    })
}

/// Makes uncertain steps certain, or leaves them out; see the module.
fn determine(steps: &mut Vec<Step>) {
    let setters = steps.iter().enumerate();
    let setters: BTreeMap<u64, usize> = setters
        .filter_map(|(number, step)| Some((step.effect.sets()?, number)))
        .collect();
    // A certain exchange makes the step certain whose value it found, which may be an exchange.
    let mut certain: Vec<usize> = (0..steps.len()).collect();
    certain.retain(|number| steps[*number].returned.is_some());
    while let Some(number) = certain.pop() {
        let Step {
            effect, returned, ..
        } = steps[number];
        let setter = effect.needs().flatten().and_then(|seen| setters.get(&seen));
        let (Some(setter), Some(before)) = (setter, returned) else {
            continue;
        };
        let setter_returned = &mut steps[*setter].returned;
        if setter_returned.is_none_or(|returned| returned > before) {
            *setter_returned = Some(before);
            certain.push(*setter);
        }
    }
    let refused: Vec<(Value, Duration)> = steps
        .iter()
        .filter_map(|step| match step.effect {
            Effect::SeesOther(other) => Some((other, step.returned?)),
            _ => None,
        })
        .collect();
    // Nobody saw the value of an uncertain step, but an exchange may have found it instead of the one that was there
    // before: that of an uncertain exchange, or any.
    let may_explain = |step: &Step| {
        let before = match step.effect {
            Effect::Exchanges(before, _) => Some(before),
            _ => None,
        };
        refused.iter().any(|(other, returned)| {
            step.invoked <= *returned && before.is_none_or(|before| before == *other)
        })
    };
    steps.retain(|step| step.returned.is_some() || may_explain(step));
}
