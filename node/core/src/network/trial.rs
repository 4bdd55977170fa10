//! Which network configuration is used, while an operator changes it: a state machine without clock, disk or network.
//!
//! There are two configurations that last: that of the parameters, and the one that an operator has set, if any. A trial
//! replaces them for a while. It ends in one of two ways: it is confirmed, after its configuration was saved, or its
//! time is over. Whatever happens, exactly one configuration is in use, and without a trial it is the one that the
//! next boot uses, too.

use std::time::Duration;

use hearth_host::network_control::{ControlError, Trial, TrialId};
use hearth_host::network_setting::NetworkSetting;
use hearth_parameters::Network;
use tokio::time::Instant;

/// The configurations of a node.
#[derive(Clone, Debug)]
pub(super) struct Configurations {
    parameters: Network,
    set_by_operator: Option<Network>,
    trial: Option<Going>,
    /// The trial that was confirmed last: its confirmation may be repeated.
    confirmed: Option<TrialId>,
}

/// A trial that goes on.
#[derive(Clone, Debug)]
struct Going {
    trial: Trial,
    until: Instant,
}

impl Configurations {
    /// Without a trial: what the parameters say, and what was saved.
    pub(super) fn new(parameters: Network, saved: Option<NetworkSetting>) -> Self {
        let saved = saved.filter(|setting| setting.applies_to(&parameters));
        Self {
            parameters,
            set_by_operator: saved.map(|setting| setting.network),
            trial: None,
            confirmed: None,
        }
    }

    /// The configuration that is used.
    pub(super) fn in_use(&self) -> &Network {
        self.chosen().unwrap_or(&self.parameters)
    }

    /// Whether that was set by an operator.
    pub(super) fn is_operators(&self) -> bool {
        self.chosen().is_some()
    }

    fn chosen(&self) -> Option<&Network> {
        match &self.trial {
            Some(going) => going.trial.network.as_ref(),
            None => self.set_by_operator.as_ref(),
        }
    }

    /// When the trial ends, if there is one.
    pub(super) fn until(&self) -> Option<Instant> {
        self.trial.as_ref().map(|going| going.until)
    }

    /// The trial, and how long it still goes on.
    pub(super) fn trial(&self, now: Instant) -> Option<(TrialId, Duration)> {
        let going = self.trial.as_ref()?;
        Some((going.trial.id, going.until.saturating_duration_since(now)))
    }

    /// Begins a trial. One that goes on already is not changed, nor is its time.
    pub(super) fn begin(&mut self, trial: Trial, now: Instant) -> Result<(), ControlError> {
        match &self.trial {
            Some(going) if going.trial.id == trial.id => Ok(()),
            Some(going) => Err(ControlError::Busy {
                left: going.until.saturating_duration_since(now),
            }),
            None => {
                let until = now + trial.timeout;
                self.trial = Some(Going { trial, until });
                Ok(())
            }
        }
    }

    /// What has to be saved before [`Self::confirmed`]; `None` if the trial was confirmed before.
    pub(super) fn to_save(&self, id: TrialId) -> Result<Option<ToSave>, ControlError> {
        match &self.trial {
            Some(going) if going.trial.id == id => {
                let parameters = self.parameters.clone();
                let setting = going.trial.network.clone().map(|network| NetworkSetting {
                    network,
                    parameters,
                });
                Ok(Some(ToSave(setting)))
            }
            _ if self.confirmed == Some(id) => Ok(None),
            _ => Err(ControlError::NoTrial),
        }
    }

    /// The configuration of the trial was saved: it is the one that lasts.
    pub(super) fn confirmed(&mut self, saved: ToSave) {
        if let Some(going) = self.trial.take() {
            self.confirmed = Some(going.trial.id);
            self.set_by_operator = saved.0.map(|setting| setting.network);
        }
    }

    /// Ends the trial if its time is over; returns whether it has.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let is_over = self.until().is_some_and(|until| until <= now);
        if is_over {
            self.trial = None;
        }
        is_over
    }
}

/// The setting that a confirmation makes lasting; none if that of the parameters is used again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToSave(pub Option<NetworkSetting>);

#[cfg(test)]
mod tests {
    use hearth_api::v1::NetworkConfig;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn network(last: u8) -> Network {
        let message = NetworkConfig {
            addresses: vec![format!("192.0.2.{last}/24")],
            ..NetworkConfig::default()
        };
        Network::parse(message).unwrap()
    }

    fn trial(id: u8, network: Option<Network>) -> Trial {
        Trial {
            id: TrialId([id; 16]),
            network,
            timeout: Duration::from_secs(60),
        }
    }

    #[test]
    fn a_trial_that_nobody_confirms_leaves_nothing() {
        let start = Instant::now();
        let mut all = Configurations::new(network(1), None);
        all.begin(trial(7, Some(network(2))), start).unwrap();
        assert_eq!(all.in_use(), &network(2));
        assert!(all.is_operators());
        // Repeated, but its time is not.
        let later = start + Duration::from_secs(59);
        all.begin(trial(7, Some(network(2))), later).unwrap();
        assert_eq!(all.trial(later).unwrap().1, Duration::from_secs(1));
        let busy = all.begin(trial(8, None), later).unwrap_err();
        assert!(matches!(busy, ControlError::Busy { .. }), "{busy}");
        assert!(!all.expire(later));
        assert!(all.expire(start + Duration::from_secs(60)));
        assert_eq!(all.in_use(), &network(1));
        let late = all.to_save(TrialId([7; 16])).unwrap_err();
        assert!(matches!(late, ControlError::NoTrial), "{late}");
    }

    #[test]
    fn what_was_confirmed_lasts_until_the_parameters_change() {
        let now = Instant::now();
        let mut all = Configurations::new(network(1), None);
        all.begin(trial(7, Some(network(2))), now).unwrap();
        let saved = all.to_save(TrialId([7; 16])).unwrap().unwrap();
        all.confirmed(saved.clone());
        assert_eq!(all.in_use(), &network(2));
        assert_eq!(all.until(), None);
        // The answer was lost.
        assert_eq!(all.to_save(TrialId([7; 16])).unwrap(), None);

        let next = Configurations::new(network(1), saved.0.clone());
        assert_eq!(next.in_use(), &network(2));
        assert!(next.is_operators());
        let other = Configurations::new(network(3), saved.0);
        assert_eq!(other.in_use(), &network(3));
        assert!(!other.is_operators());
    }

    #[test]
    fn the_parameters_can_be_used_again() {
        let now = Instant::now();
        let setting = NetworkSetting {
            network: network(2),
            parameters: network(1),
        };
        let mut all = Configurations::new(network(1), Some(setting));
        assert_eq!(all.in_use(), &network(2));
        all.begin(trial(7, None), now).unwrap();
        assert_eq!(all.in_use(), &network(1));
        let saved = all.to_save(TrialId([7; 16])).unwrap().unwrap();
        assert_eq!(saved.0, None);
        all.confirmed(saved);
        assert!(!all.is_operators());
        assert_eq!(all.in_use(), &network(1));
    }

    #[derive(Clone, Debug)]
    enum Event {
        Begin(u8, Option<u8>),
        Confirm(u8),
        Pass(u64),
        Reboot,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            (0..4u8, proptest::option::of(1..9u8)).prop_map(|(id, to)| Event::Begin(id, to)),
            (0..4u8).prop_map(Event::Confirm),
            (0..90u64).prop_map(Event::Pass),
            Just(Event::Reboot),
        ]
    }

    proptest! {
        /// Without a trial the configuration is the one that was confirmed last, whatever happened; with one, it is used for
        /// a minute at most.
        #[test]
        fn only_what_was_confirmed_lasts(events in vec(event(), 0..40)) {
            let mut now = Instant::now();
            let mut saved: Option<NetworkSetting> = None;
            let mut all = Configurations::new(network(1), None);
            for event in events {
                match event {
                    Event::Begin(id, to) => {
                        let wanted = to.map(network);
                        let was_going = all.trial(now).is_some();
                        let begun = all.begin(trial(id, wanted.clone()), now).is_ok();
                        if begun && !was_going {
                            prop_assert_eq!(all.in_use(), &wanted.unwrap_or(network(1)));
                        }
                    }
                    Event::Confirm(id) => {
                        let in_use = all.in_use().clone();
                        if let Ok(Some(to_save)) = all.to_save(TrialId([id; 16])) {
                            saved = to_save.0.clone();
                            all.confirmed(to_save);
                        }
                        prop_assert_eq!(all.in_use(), &in_use);
                    }
                    Event::Pass(seconds) => {
                        now += Duration::from_secs(seconds);
                        all.expire(now);
                    }
                    Event::Reboot => all = Configurations::new(network(1), saved.clone()),
                }
                match all.until() {
                    Some(until) => prop_assert!(until > now && until - now <= Duration::from_secs(60)),
                    None => {
                        let lasting = saved.as_ref().map_or(network(1), |setting| setting.network.clone());
                        prop_assert_eq!(all.in_use(), &lasting);
                    }
                }
            }
        }
    }
}
