use super::*;

/// The circles of a crate with one file.
fn circles(source: &str) -> Vec<String> {
    let file = syn::parse_file(source).unwrap();
    let mut modules = Modules(vec![Module::default()]);
    assert!(modules.add(0, &file.items, "").is_empty());
    modules.circles()
}

fn circle(source: &str) -> String {
    let mut circles = circles(source);
    assert_eq!(circles.len(), 1, "{circles:?}");
    circles.remove(0)
}

#[test]
fn a_circle_is_named_with_its_places() {
    let source = "mod a { use crate::b::B;\n pub struct A; }\nmod b { pub struct B(super::c::C); }\nmod c { pub struct C;\n fn f() { crate::a::A; } }";
    assert_eq!(
        circle(source),
        "a uses b (:1), b uses c (:3), c uses a (:5)"
    );
}

#[test]
fn one_way_is_no_circle() {
    let one_way = "mod a { use crate::{b::B, c::C}; } mod b { pub struct B(super::c::C); } mod c { pub struct C; }";
    assert_eq!(circles(one_way), [""; 0]);
    let of_others = "mod a { use core::b::X; use ::b::X; } mod b { use crate::a::Y; }";
    assert_eq!(circles(of_others), [""; 0]);
}

#[test]
fn grouped_and_nested_imports_count() {
    circle(
        "mod a { use crate::{c, b::{self, d::{E, F}}}; } mod b { use super::{super::super::x::Y, a as z}; } mod c {}",
    );
    circle(
        "mod a { fn f() { use crate::{c::C, b}; } } mod b { fn f() { { use super::a::{x, y}; } } }",
    );
}

#[test]
fn plain_paths_count_in_types_expressions_and_macros() {
    circle(
        "mod a { fn f(x: &crate::b::B) {} } mod b { fn f() { format!(\"{}\", [super::a::f(1)]) } }",
    );
    circle("mod a { use crate::b; } mod b { impl Iterator for X<super::a::A> {} }");
    circle(
        "use other as o; mod a { fn f() { super::b::g!() } } mod b { fn f() { select! { x = crate::a::f() => {} } } }",
    );
}

#[test]
fn a_re_export_leads_to_where_the_item_is() {
    // Through the parent.
    circle(
        "pub use b::B; mod a { use crate::B; pub struct A; } mod b { use super::a::A; pub struct B; }",
    );
    circle(
        "pub use self::b::*; mod a { use super::*; fn f(b: B) {} } mod b { use crate::a; pub struct B; }",
    );
    // Through a third module, which is an edge to that one, too.
    let facade = "mod a { pub use crate::b::B; } mod b { use crate::c; pub struct B; } mod c { use crate::a::B; }";
    assert!(circle(facade).contains("c uses a"), "{}", circle(facade));
    circle(
        "mod a { pub use crate::b::B; use crate::c; } mod b { pub struct B; } mod c { use crate::a::B; }",
    );
    // Mutually recursive imports end.
    assert_eq!(
        circles("mod a { use x::y; use y::x; fn f() { x::z() } }"),
        [""; 0]
    );
}

#[test]
fn a_parent_and_its_child_are_one() {
    let both = "mod a { mod b { use super::A; fn f() { crate::a::g() } } pub struct A(b::B); fn g() { b::f() } } use a::A; fn f() {}";
    assert_eq!(circles(both), [""; 0]);
}

#[test]
fn each_level_is_looked_at() {
    let below = "mod a { mod b { use super::c::C; } mod c { mod d { use crate::a::b::B; } pub struct C; } }";
    assert_eq!(circle(below), "a::b uses a::c (:1), a::c uses a::b (:1)");
    circle(
        "mod a { pub mod b { use crate::c::d; } } mod c { pub mod d { use super::super::a::b; } }",
    );
}

#[test]
fn what_only_tests_compile_is_left_out() {
    for condition in ["test", "all(unix, test)", "any(test, all(test, unix))"] {
        let tests = format!(
            "mod a {{ #[cfg({condition})] mod tests {{ use crate::b::B; }} #[cfg({condition})] use crate::b; #[cfg({condition})] fn f() {{ crate::b::f() }}
             impl A {{ #[cfg({condition})] fn f() -> crate::b::B {{}} }} struct A {{ #[cfg({condition})] b: crate::b::B }}
             fn g() {{ #[cfg({condition})] let b = crate::b::f(); }} }} mod b {{ use crate::a::A; }}"
        );
        assert_eq!(circles(&tests), [""; 0]);
    }
    for condition in ["not(test)", "feature = \"testing\"", "any(test, unix)"] {
        circle(&format!(
            "mod a {{ #[cfg({condition})] mod tests {{ use crate::b::B; }} }} mod b {{ use crate::a::A; }}"
        ));
    }
}

#[test]
fn links_in_comments_do_not_count() {
    let links = "/// See [`crate::b::B`].\nmod a { /// As [b](super::b).\n pub struct A; } mod b { use crate::a::A; }";
    assert_eq!(circles(links), [""; 0]);
}
