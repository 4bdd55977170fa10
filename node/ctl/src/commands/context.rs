//! `hearthctl context`: manages contexts.

use hearth_api::client::Endpoint;

use super::{print, print_json};
use crate::args::{Context, Format, Global};
use crate::context::{self, Contexts};
use crate::failure::Failure;
use crate::output;

pub(super) fn run(global: &Global, command: Context) -> Result<(), Failure> {
    let file = global.config.clone();
    match command {
        Context::List { output } => list(&Contexts::load(file)?, output.form),
        Context::Use { name } => Contexts::change(file, |contexts| contexts.select(&name)),
        Context::Route { address, via } => Contexts::change(file, |contexts| {
            contexts.route(global.context.as_deref(), &address, via.as_ref())
        }),
        Context::Show { name } => {
            let name = name.as_deref().or(global.context.as_deref());
            print_json(Contexts::load(file)?.get(name)?.1)
        }
    }
}

fn list(contexts: &Contexts, form: Format) -> Result<(), Failure> {
    let listed = |(name, context): (&String, &context::Context)| {
        Ok(output::ListedContext {
            name: name.clone(),
            is_current: contexts.current() == Some(name),
            cluster_id: context.cluster_id.clone(),
            endpoints: context
                .endpoints()?
                .iter()
                .map(Endpoint::to_string)
                .collect(),
        })
    };
    let listed: Result<Vec<_>, Failure> = contexts.all().iter().map(listed).collect();
    let listed = listed?;
    match form {
        Format::Table => print(&output::context_table(&listed).to_string()),
        Format::Json => print_json(&listed),
    }
}
