//! A connection by the segments of a machine, where those of a simulated one do not show what is tested.

use std::cell::RefCell;
use std::net::Ipv4Addr;

use smoltcp::wire::{EthernetFrame, Ipv4Packet, TcpControl, TcpPacket, TcpSeqNumber};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::*;
use crate::packets;

const MAC: Address = [0x52, 0x54, 0, 0x48, 0, 1];
const MACHINE: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 98, 0, 10), 4000);
const REMOTE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 80);

/// The machine's first sequence number.
const FIRST: TcpSeqNumber = TcpSeqNumber(100);

const BOUND: Duration = Duration::from_secs(20);

/// Collects what is sent to the machine.
#[derive(Default)]
struct Sent {
    frames: RefCell<Vec<Vec<u8>>>,
    more: Notify,
}

impl Way for Sent {
    fn to(&self) -> Address {
        MAC
    }

    fn send(&self, frame: &[u8]) {
        self.frames.borrow_mut().push(frame.to_vec());
        self.more.notify_one();
    }

    fn has_room(&self) -> bool {
        true
    }

    async fn drained(&self) {
        std::future::pending().await
    }
}

impl Sent {
    /// The sequence number of the next segment of this kind.
    async fn next(&self, wanted: impl Fn(&TcpPacket<&[u8]>) -> bool) -> TcpSeqNumber {
        let found = async {
            loop {
                for frame in self.frames.take() {
                    let ethernet = EthernetFrame::new_checked(&frame[..]).expect("a frame");
                    let packet = Ipv4Packet::new_checked(ethernet.payload()).expect("IP");
                    let segment = TcpPacket::new_checked(packet.payload()).expect("TCP");
                    if wanted(&segment) {
                        return segment.seq_number();
                    }
                }
                self.more.notified().await;
            }
        };
        timeout(BOUND, found).await.expect("in time")
    }
}

fn segment(control: TcpControl, seq: TcpSeqNumber, ack: Option<TcpSeqNumber>) -> Vec<u8> {
    packets::segment(MAC, MACHINE, REMOTE, control, seq, ack)
}

#[tokio::test]
async fn an_end_is_repeated_whatever_was_acknowledged_before() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .expect("a port");
    let address = listener.local_addr().expect("an address");
    let (host, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    let ends = Ends {
        from: REMOTE.into(),
        to: MACHINE.into(),
    };
    let (inbox, sent) = (Inbox::default(), Sent::default());
    let opener = Opener::Machine(segment(TcpControl::Syn, FIRST, None));
    let host = host.expect("connected");
    let carried = carry(host, opener, ends, Clock::start(), &inbox, &sent);
    let machine = async {
        let first = sent.next(|segment| segment.syn()).await;
        inbox.put(segment(TcpControl::None, FIRST + 1, Some(first + 1)));
        // The host ends its direction.
        drop(accepted);
        let end = sent.next(|segment| segment.fin()).await;
        // The data before the end are acknowledged again and again, the end is not.
        for _ in 0..5 {
            inbox.put(segment(TcpControl::None, FIRST + 1, Some(end)));
        }
        assert_eq!(sent.next(|segment| segment.fin()).await, end);
        inbox.put(segment(TcpControl::Fin, FIRST + 1, Some(end + 1)));
    };
    let (end, ()) = tokio::join!(timeout(BOUND, carried), machine);
    assert_eq!(end.expect("in time"), End::Finished);
}
