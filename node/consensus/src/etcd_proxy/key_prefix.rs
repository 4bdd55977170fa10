//! What becomes of a message on its way: keys get the prefix or lose it.
//!
//! Pure: no call is made here.

use std::sync::Arc;

use prost::Message;
use tonic::Status;

use super::super::client::successor;
use super::super::wire::request_op::Request as Asked;
use super::super::wire::response_op::Response as Answered;
use super::super::wire::watch_request::RequestUnion;
use super::super::wire::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, KeyValue, PutRequest, PutResponse,
    RangeRequest, RangeResponse, RequestOp, ResponseOp, TxnRequest, TxnResponse, WatchRequest,
    WatchResponse,
};
use super::leases;

/// Transactions in transactions; etcd's callers have none.
const DEEPEST_TXN: usize = 4;

/// etcd's words, by which its callers know what is meant.
pub(super) const EMPTY_KEY: &str = "etcdserver: key is not provided";

/// One user's prefix.
#[derive(Clone)]
pub(super) struct KeyPrefix {
    prefix: Arc<[u8]>,
    /// The first key behind it.
    end: Arc<[u8]>,
}

impl KeyPrefix {
    pub(super) fn new(prefix: &[u8]) -> Self {
        Self {
            prefix: prefix.into(),
            end: successor(prefix).into(),
        }
    }

    /// A key, as the store has it.
    pub(super) fn up(&self, key: &mut Vec<u8>) -> Result<(), Status> {
        if key.is_empty() {
            return Err(Status::invalid_argument(EMPTY_KEY));
        }
        key.splice(..0, self.prefix.iter().copied());
        Ok(())
    }

    /// The end of a range, as the store has it. Empty is no range, and one zero
    /// byte the end of everything.
    pub(super) fn end_up(&self, end: &mut Vec<u8>) {
        match &end[..] {
            [] => {}
            [0] => *end = self.end.to_vec(),
            _ => drop(end.splice(..0, self.prefix.iter().copied())),
        }
    }

    /// A key, as the program has it.
    pub(super) fn down(&self, key: &mut Vec<u8>) -> Result<(), Status> {
        if !key.starts_with(&self.prefix) {
            return Err(Status::internal("etcd answered with somebody else's key"));
        }
        key.drain(..self.prefix.len());
        Ok(())
    }

    pub(super) fn all_down<'a>(
        &self,
        records: impl IntoIterator<Item = &'a mut KeyValue>,
    ) -> Result<(), Status> {
        let mut records = records.into_iter();
        records.try_for_each(|record| self.down(&mut record.key))
    }

    pub(super) fn range_up(&self, request: &mut RangeRequest) -> Result<(), Status> {
        self.up(&mut request.key)?;
        self.end_up(&mut request.range_end);
        Ok(())
    }

    pub(super) fn put_up(&self, request: &mut PutRequest) -> Result<(), Status> {
        if request.lease != 0 && !leases::is_ours(request.lease) {
            return Err(Status::not_found(leases::NO_SUCH_LEASE));
        }
        self.up(&mut request.key)
    }

    pub(super) fn delete_up(&self, request: &mut DeleteRangeRequest) -> Result<(), Status> {
        self.up(&mut request.key)?;
        self.end_up(&mut request.range_end);
        Ok(())
    }

    pub(super) fn compare_up(&self, compare: &mut Compare) -> Result<(), Status> {
        self.up(&mut compare.key)?;
        self.end_up(&mut compare.range_end);
        Ok(())
    }

    pub(super) fn txn_up(&self, request: &mut TxnRequest, depth: usize) -> Result<(), Status> {
        if depth > DEEPEST_TXN {
            return Err(Status::invalid_argument("too many transactions in another"));
        }
        for compare in &mut request.compare {
            self.compare_up(compare)?;
        }
        for operation in request.success.iter_mut().chain(&mut request.failure) {
            self.operation_up(operation, depth)?;
        }
        Ok(())
    }

    fn operation_up(&self, operation: &mut RequestOp, depth: usize) -> Result<(), Status> {
        match &mut operation.request {
            Some(Asked::RequestRange(range)) => self.range_up(range),
            Some(Asked::RequestPut(put)) => self.put_up(put),
            Some(Asked::RequestDeleteRange(delete)) => self.delete_up(delete),
            Some(Asked::RequestTxn(txn)) => self.txn_up(txn, depth + 1),
            // One that is not known here would pass by what is above.
            None => Err(Status::invalid_argument("an operation of an unknown kind")),
        }
    }

    pub(super) fn txn_down(&self, answer: &mut TxnResponse) -> Result<(), Status> {
        let mut answers = answer.responses.iter_mut();
        answers.try_for_each(|answer| self.operation_down(answer))
    }

    fn operation_down(&self, answer: &mut ResponseOp) -> Result<(), Status> {
        match &mut answer.response {
            Some(Answered::ResponseRange(range)) => self.all_down(&mut range.kvs),
            Some(Answered::ResponsePut(put)) => self.all_down(&mut put.prev_kv),
            Some(Answered::ResponseDeleteRange(delete)) => self.all_down(&mut delete.prev_kvs),
            Some(Answered::ResponseTxn(txn)) => self.txn_down(txn),
            None => Ok(()),
        }
    }

    /// A watch without a key is one from the first key on.
    pub(super) fn watch_up(&self, request: &mut WatchRequest) {
        if let Some(RequestUnion::CreateRequest(create)) = &mut request.request_union {
            create.key.splice(..0, self.prefix.iter().copied());
            self.end_up(&mut create.range_end);
        }
    }

    pub(super) fn watch_down(&self, answer: &mut WatchResponse) -> Result<(), Status> {
        for event in &mut answer.events {
            self.all_down(&mut event.kv)?;
            self.all_down(&mut event.prev_kv)?;
        }
        Ok(())
    }
}

/// A request about keys, which is passed on.
pub(super) trait HasKeys: Message + Default {
    /// Of the call, by which HTTP/2 names it.
    const PATH: &'static str;
    /// What etcd answers.
    type Answer: Message + Default;

    /// As the store has it.
    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status>;

    /// As the program has it.
    fn down(answer: &mut Self::Answer, prefix: &KeyPrefix) -> Result<(), Status>;

    /// Whether it may write more than it removes.
    fn may_put(&self) -> bool {
        false
    }
}

impl HasKeys for RangeRequest {
    const PATH: &'static str = "/etcdserverpb.KV/Range";
    type Answer = RangeResponse;

    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.range_up(self)
    }

    fn down(answer: &mut RangeResponse, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.all_down(&mut answer.kvs)
    }
}

impl HasKeys for PutRequest {
    const PATH: &'static str = "/etcdserverpb.KV/Put";
    type Answer = PutResponse;

    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.put_up(self)
    }

    fn down(answer: &mut PutResponse, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.all_down(&mut answer.prev_kv)
    }

    fn may_put(&self) -> bool {
        true
    }
}

impl HasKeys for DeleteRangeRequest {
    const PATH: &'static str = "/etcdserverpb.KV/DeleteRange";
    type Answer = DeleteRangeResponse;

    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.delete_up(self)
    }

    fn down(answer: &mut DeleteRangeResponse, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.all_down(&mut answer.prev_kvs)
    }
}

impl HasKeys for TxnRequest {
    const PATH: &'static str = "/etcdserverpb.KV/Txn";
    type Answer = TxnResponse;

    // A lease that stands in a comparison is compared as it is: it tells
    // nothing but whether the own key bears it.
    fn up(&mut self, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.txn_up(self, 0)
    }

    fn down(answer: &mut TxnResponse, prefix: &KeyPrefix) -> Result<(), Status> {
        prefix.txn_down(answer)
    }

    /// By how its comparisons end.
    fn may_put(&self) -> bool {
        let mut operations = self.success.iter().chain(&self.failure);
        operations.any(|operation| match &operation.request {
            Some(Asked::RequestPut(_)) => true,
            Some(Asked::RequestTxn(inner)) => inner.may_put(),
            _ => false,
        })
    }
}
